"""What the stand-in of any cloud needs."""
