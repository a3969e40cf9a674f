"""The workspace of yours that the live tests run in, as the environment names it."""

import os

import pytest

NEEDED = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "DILOCO_LIVE_MODAL_APP")


def live_app():
    """Name of the deployed app; skips the test if the environment has no name or no token."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        pytest.skip(f"the live tests need {', '.join(missing)}; the README says what for")
    return os.environ["DILOCO_LIVE_MODAL_APP"]
