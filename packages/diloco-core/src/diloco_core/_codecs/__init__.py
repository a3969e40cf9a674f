"""How contributions are encoded and decoded.

Each codec has a module here; its class implements :class:`._codec.Codec`.
"""
