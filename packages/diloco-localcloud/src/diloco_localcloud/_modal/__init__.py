"""The stand-ins for Modal."""
