"""The bridge to torchft, in both directions."""
