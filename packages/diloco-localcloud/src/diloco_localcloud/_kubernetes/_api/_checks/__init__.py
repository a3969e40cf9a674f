"""What the API server adds to an object that was sent, and what it refuses."""
