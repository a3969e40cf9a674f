"""Pods that are processes of this machine."""
