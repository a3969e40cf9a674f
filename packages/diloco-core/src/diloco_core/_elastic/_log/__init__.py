"""What an elastic run writes: keys, records, contributions; and the rules of who counts, as pure functions."""
