"""Quantities, such as ``500m`` or ``2Gi``."""

from __future__ import annotations

import re

_QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
_UNITS = (
    {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0}
    | {
        prefix + binary: (1024.0 if binary else 1000.0) ** power
        for power, prefix in enumerate(("K", "M", "G", "T", "P", "E"), 1)
        for binary in ("", "i")
    }
    | {"k": 1000.0}
)


def quantity(value: object) -> float:
    """Return a quantity such as ``500m`` or ``2Gi`` as a number.

    Raises:
        ValueError: it is not a quantity.
    """
    text = str(value)
    # No real amount takes more than 64 characters, and a float may not hold such a number.
    if isinstance(value, bool) or len(text) > 64 or not _QUANTITY.fullmatch(text):
        raise ValueError(
            "quantities must match the regular expression "
            "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        )
    number = text.rstrip("iKMGTPEnumk")
    unit = text[len(number) :]
    amount = float(number) * _UNITS[unit]
    if amount in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large for a quantity")
    return amount
