"""How contributions become bytes and back. A codec is a module here, with a class of the kind :class:`._codec.Codec`."""
