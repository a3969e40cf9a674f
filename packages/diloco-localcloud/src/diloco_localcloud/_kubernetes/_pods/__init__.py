"""Pods, pure: what is read off one, and the steps of its state."""
