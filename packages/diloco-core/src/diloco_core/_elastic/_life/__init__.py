"""One life of a rank: who it is, where it stands in the log, what it holds, and what it keeps in mind."""
