"""What an incarnation decides in one sync, as pure functions.

They say which ranks are in it, and which rank computes which part of its result.
"""
