"""The arithmetic that all exchanges share: how values are divided, contributed, added up and adopted."""
