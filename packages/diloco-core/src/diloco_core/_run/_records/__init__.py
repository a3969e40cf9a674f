"""The keys, records and contributions of a run, and pure functions that say which of them count."""
