"""One sync of an elastic run: contributing, waiting for the record, adopting its result; and catching up with the log."""
