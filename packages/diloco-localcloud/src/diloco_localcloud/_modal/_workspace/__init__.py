"""What a workspace of Modal holds, and what happens to its calls in time.

Nothing here knows how it is asked.
"""
