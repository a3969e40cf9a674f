"""Pods that do what a test says."""
