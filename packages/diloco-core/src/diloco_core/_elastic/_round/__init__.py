"""One round of an elastic sync as pure functions of values: who is in it, and who computes which part of its result."""
