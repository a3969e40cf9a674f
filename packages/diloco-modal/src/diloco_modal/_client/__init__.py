"""Calls to Modal: its client, the connection, records of runs, errors."""
