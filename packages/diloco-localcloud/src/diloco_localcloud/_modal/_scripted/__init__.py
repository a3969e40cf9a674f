"""Calls and a clock that a test moves."""
