"""Runs with fixed membership in stores that cannot decide which process creates an object first."""
