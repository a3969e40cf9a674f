"""The outer loop, which uses all other parts of the package."""
