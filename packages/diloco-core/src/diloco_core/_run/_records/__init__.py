"""What a run writes (keys, records, contributions), and, as pure functions, the rules that say which of it counts."""
