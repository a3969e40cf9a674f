"""The path from a request to its answer: the operations, and the protocols that carry them."""
