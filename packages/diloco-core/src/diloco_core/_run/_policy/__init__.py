"""What fixed runs add: how they begin, the ranks that are waited for, and how they end without one.

In fixed runs all ranks take part in every sync. In elastic runs replicas come and go.
"""
