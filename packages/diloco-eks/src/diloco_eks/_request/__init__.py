"""Options, names, and the pure builders of what is sent to the cluster."""
