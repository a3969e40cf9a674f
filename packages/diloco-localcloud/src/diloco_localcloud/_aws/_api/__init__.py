"""From a request to an answer: the operations, and the protocols in which they are asked for."""
