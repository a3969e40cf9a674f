"""The objects of the API: their kinds, and where they are kept."""
