"""Jobs, pure: what follows from the state of a Job and of its pods."""
