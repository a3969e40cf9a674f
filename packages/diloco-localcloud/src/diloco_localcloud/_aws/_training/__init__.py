"""Training jobs: their states, their descriptions, and the region that keeps them."""
