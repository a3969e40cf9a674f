"""The arithmetic that all exchanges share: how values are cut, contributed, added up and adopted."""
