"""Amounts of CPU and memory in Kubernetes' notation."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import cast

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import shown

_QUANTITY = re.compile(
    r"(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?\d{1,2})?",
    re.ASCII,
)
_SUFFIXES = {
    "": Fraction(1),
    **{letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", 1)},
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", 1)},
}
# Container runtimes refuse less.
_LEAST_BYTES = 6 * 1024**2


def parse_quantity(text: str) -> Fraction | None:
    """Return the amount of a quantity such as ``"500m"``, ``"16Gi"`` or ``"1e3"``.

    None if the text is not a quantity.

    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    suffix = match[2] or ""
    scale = _SUFFIXES[suffix] if suffix in _SUFFIXES else Fraction(10) ** int(suffix[1:])
    return Fraction(match[1].rstrip(".") if match[1].endswith(".") else match[1]) * scale


def check_cpu(what: str, value: object) -> str:
    """Check for a number of CPUs of a replica.

    Raises:
        InvalidRequestError: The value is not a quantity of at least a thousandth.
    """
    text = _text(value)
    amount = parse_quantity(text)
    if amount is None or amount < Fraction(1, 1000):
        raise InvalidRequestError(
            f"{what} must be a quantity of CPUs such as '4' or '500m', not {shown(value)}"
        )
    return text


def check_bytes(what: str, value: object) -> str:
    """Check for an amount of memory or storage of a replica.

    Raises:
        InvalidRequestError: The value is not a quantity of bytes, or too little for a container.
    """
    text = _text(value)
    amount = parse_quantity(text)
    if amount is None:
        hint = ""
        if isinstance(value, str) and re.fullmatch(r"[\d.]+ ?[kKMGT]i?[bB]", value):
            hint = f"; say {value.replace(' ', '')[:-1]!r}"
        raise InvalidRequestError(
            f"{what} must be a quantity of bytes such as '16Gi' or '500M', not {shown(value)}{hint}"
        )
    if amount < _LEAST_BYTES:
        raise InvalidRequestError(
            f"{what}={shown(value)} is {float(amount):g} bytes; no container starts in less than "
            "6Mi"
        )
    return text


def _text(value: object) -> str:
    if type(value) in {int, float} and -(2**63) < cast("float", value) < 2**63:
        return str(value)
    return value if isinstance(value, str) else ""
