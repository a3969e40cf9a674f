"""One incarnation of a rank: its identity, where it stands in the log, what it holds, and what it remembers from sync to sync."""
