"""What overlap and codecs gain and what they cost, in loss, bytes and time: ``hatch run bench-proof``.

See README.md.
"""
