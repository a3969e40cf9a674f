"""``report``: one page about a run, and the same numbers as JSON."""
