"""The gains and costs of overlap and codecs, in loss, bytes and time: ``hatch run bench-proof``.

See README.md.
"""
