"""The complete states of an elastic run: published, kept, loaded, and gone back to."""
