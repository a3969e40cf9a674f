"""Secrets stay out of what is shown."""

import pytest

from diloco_protocol.backend import REDACTED, redact


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "PGPASSWD", "GOOGLE_APPLICATION_CREDENTIALS",
        "WANDB_API_KEY", "apikey", "ACCESSKEY", "PRIVATE_KEY",
    ],
)  # fmt: skip
def test_values_with_the_name_of_a_secret_are_left_out(name):
    assert redact(name, "hunter2") == REDACTED == "<redacted>"


@pytest.mark.parametrize("name", ["PATH", "AWS_REGION", "KEYBOARD", "OMP_NUM_THREADS"])
def test_other_values_are_shown(name):
    assert redact(name, "hunter2") == "hunter2"
