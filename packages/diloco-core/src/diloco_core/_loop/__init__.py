"""The outer loop, which calls everything else."""
