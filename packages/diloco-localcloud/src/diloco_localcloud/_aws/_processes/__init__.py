"""Training jobs that are processes of this machine."""
