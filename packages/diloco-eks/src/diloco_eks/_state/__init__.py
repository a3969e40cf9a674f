"""Facts, states and ends, read from what the cluster answered, without a call."""
