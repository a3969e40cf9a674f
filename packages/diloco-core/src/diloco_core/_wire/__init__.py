"""Define what the objects in a store hold, byte by byte."""
