"""Pods, as pure functions: the facts about a pod, and the steps of its state."""
