"""One sync of a run: contributing, waiting for the record, adopting its result; and catching up with the log."""
