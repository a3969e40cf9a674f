"""What a strict run writes: what it is, its records and their version, its contributions, and requests to write a shard again."""
