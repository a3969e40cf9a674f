"""The arithmetic of all exchanges: how values are divided, contributed, added up and adopted."""
