"""Jobs, as pure functions: the next steps from the state of a Job and of its pods."""
