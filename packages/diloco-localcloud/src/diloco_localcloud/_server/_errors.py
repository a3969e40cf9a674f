"""The error of a stand-in itself."""


class StandInError(Exception):
    """The error of a stand-in that cannot start or do as asked; it says why and what to do."""
