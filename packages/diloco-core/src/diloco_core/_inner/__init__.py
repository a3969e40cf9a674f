"""The inner training of one replica: its state, its steps, and changes that no step explains."""
