"""The model: which of its tensors are synced, what else it holds, and whether it is still as it was."""
