"""The contents of a Modal workspace, and what happens to its calls over time.

Nothing here depends on the protocol of the requests.
"""
