"""The complete states of an elastic run: publishing, keeping and loading them, and going back to them."""
