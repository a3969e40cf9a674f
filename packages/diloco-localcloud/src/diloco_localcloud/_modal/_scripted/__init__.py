"""Calls that do what a test says, and the clock in the test's hands."""
