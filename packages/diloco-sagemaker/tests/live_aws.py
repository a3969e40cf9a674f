"""The account of yours that the live tests run in, as the environment names it."""

import os

import pytest

NEEDED = ("DILOCO_LIVE_ROLE_ARN", "DILOCO_LIVE_IMAGE", "DILOCO_LIVE_S3_PATH")


def live_options():
    """What an executor needs to know; skips the tests if the environment names not all of it."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        pytest.skip(f"the live tests need {', '.join(missing)}; the README says what for")
    role, image, path = (os.environ[name] for name in NEEDED)
    return {"role_arn": role, "image_uri": image, "output_s3_path": path}
