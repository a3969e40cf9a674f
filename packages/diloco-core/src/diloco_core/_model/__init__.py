"""The model: its synced tensors, what else it holds, and whether it is still as it was."""
