"""The defaults that the API server adds to an object that was sent, and its refusals."""
