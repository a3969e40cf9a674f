"""Options, names and pure builders of what is sent to Modal."""
