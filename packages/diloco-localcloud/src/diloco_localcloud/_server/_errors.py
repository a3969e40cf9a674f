"""The error of a stand-in itself."""


class StandInError(Exception):
    """A stand-in cannot start or do what it is asked; the message says why and what to do."""
