"""Strict membership: all ranks or nothing."""
