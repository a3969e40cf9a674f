"""Several processes that are one replica: one of them exchanges, and the others follow."""
