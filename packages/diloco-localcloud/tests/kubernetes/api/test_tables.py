"""Tables, as kubectl asks for them."""

from __future__ import annotations

import pytest

from diloco_localcloud._kubernetes._api import _tables


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (187, "3m"),
        (3600, "60m"),
        (3 * 3600, "3h"),
        (72 * 3600, "3d"),
    ],
)
def test_ages(seconds, text):
    assert _tables.age(seconds) == text
