"""The stand-in of the Kubernetes API."""
