"""Facts, states and ends: pure functions that read what the cluster answered."""
