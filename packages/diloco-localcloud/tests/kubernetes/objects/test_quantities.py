"""Quantities, as Kubernetes writes them."""

from __future__ import annotations

import pytest

from diloco_localcloud._kubernetes._objects._quantities import quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", 8.0),
        ("500m", 0.5),
        ("2Gi", 2.0 * 1024**3),
        ("1.5k", 1500.0),
        ("-1e3", -1000.0),
        (4, 4.0),
        ("2E", 2e18),
    ],
)
def test_quantities(text, number):
    assert quantity(text) == number


@pytest.mark.parametrize("text", ["", "many", "2GB", "1 Gi", "Gi", True, "1e"])
def test_what_is_not_a_quantity(text):
    with pytest.raises(ValueError, match="quantities must match"):
        quantity(text)
