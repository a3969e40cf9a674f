"""Training jobs: their states, what is told of them, and the region that keeps them."""
