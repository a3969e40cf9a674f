"""What the server asks of a pod before it keeps it: classes, limits, quotas, the Pod Security Standards.

Pure, but for reads.
"""
