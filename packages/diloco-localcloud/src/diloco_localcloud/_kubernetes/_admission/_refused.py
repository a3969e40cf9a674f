"""Why a pod is not kept."""


class RefusedError(Exception):
    """What stands behind ``pods "x" is forbidden:``."""
