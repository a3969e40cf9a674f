"""One sync of an elastic run: contribute, wait for the record, adopt it, or catch up with the log."""
