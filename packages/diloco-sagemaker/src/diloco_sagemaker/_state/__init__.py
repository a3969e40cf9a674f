"""Facts about jobs, and the states and handles that follow from them: pure functions."""
