"""The stand-ins for the Kubernetes API."""
