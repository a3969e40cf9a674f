"""The inner training of one replica: its state, its steps, and the changes that no step accounts for."""
