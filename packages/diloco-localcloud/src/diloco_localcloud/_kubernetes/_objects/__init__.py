"""The objects of the API: their kinds, and the store that keeps them."""
