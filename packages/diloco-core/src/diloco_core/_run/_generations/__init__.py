"""Runs with fixed membership in stores that cannot decide which of two processes creates an object first."""
