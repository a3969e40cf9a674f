"""One incarnation of a rank: its identity, its place in the log, its state and its memory."""
