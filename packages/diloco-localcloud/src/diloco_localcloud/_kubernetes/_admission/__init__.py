"""The rules for a new pod: classes, limits, quotas, the Pod Security Standards.

Pure functions, apart from reads of the store.
"""
