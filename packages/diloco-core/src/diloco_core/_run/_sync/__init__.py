"""One sync of a run, and catching up with the log.

The parts of a sync are contributing, waiting for the record, and adopting its result.
"""
