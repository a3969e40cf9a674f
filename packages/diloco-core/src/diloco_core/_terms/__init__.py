"""The terms that the replicas of a run agree on, and what an exchange can do.

An option of the outer loop is a field here.
"""
