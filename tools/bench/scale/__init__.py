"""What a sync costs as replicas grow: the real exchanges in virtual time over a model of S3.

See README.md.
"""
