"""The drivers: a folder, and what is behind a network, through fsspec or obstore."""
