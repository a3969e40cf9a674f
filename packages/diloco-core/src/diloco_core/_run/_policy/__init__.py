"""The differences between runs with fixed and with elastic membership.

In fixed runs all ranks take part in every sync. In elastic runs replicas come and go.
"""
