"""Training jobs and a clock that a test moves."""
