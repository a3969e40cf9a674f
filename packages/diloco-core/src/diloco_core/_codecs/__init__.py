"""Encode and decode contributions.

Each codec has a module here; its class implements :class:`._codec.Codec`.
"""
