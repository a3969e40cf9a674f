"""The reason why a pod is refused."""


class RefusedError(Exception):
    """The part of the message after ``pods "x" is forbidden:``."""
