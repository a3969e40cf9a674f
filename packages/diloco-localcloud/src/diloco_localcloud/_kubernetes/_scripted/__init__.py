"""Pods that a test moves."""
