"""Options, names, and the requests that are made of them: pure functions."""
