"""The complete states of a run: publishing, keeping and loading them, and going back to them."""
