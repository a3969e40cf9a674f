"""Calls that are processes of this machine: their environment, signals, output and end."""
