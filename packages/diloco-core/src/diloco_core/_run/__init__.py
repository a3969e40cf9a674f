"""Runs over a store, with fixed and with elastic membership."""
