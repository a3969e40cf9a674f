"""The stand-ins of Modal."""
