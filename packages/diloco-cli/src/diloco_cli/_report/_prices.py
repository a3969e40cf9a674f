"""The price table, and what a run has cost by it: pure functions. Nothing is guessed."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import shown

from ._replicas import Incarnation

MOST_BYTES = 1 << 20
"""The largest price table."""
PARTS = {
    "replica_hour": "hours of replicas",
    "sent_gb": "GB sent into the store",
    "received_gb": "GB received from the store",
}
"""The parts of the cost, and what each is measured in."""
_HIGHEST = 1e9


Prices = Mapping[str, Any]
"""The day on which prices were true (``date``), and by part a price in US dollars by name: of a
backend and place, or of the kind of store. ``"*"`` is for all others."""
# It has what stores list for data that comes in. Nothing else follows from what replicas tell: not
# which machine one has, and not whether it is in the region of its store.
DEFAULT = Path(__file__).with_name("prices.json")


def read_prices(data: bytes) -> Prices:
    """Return the prices that a table in JSON holds.

    Raises:
        InvalidRequestError: It is not such a table; the error says what is wrong.
    """
    if len(data) > MOST_BYTES:
        raise InvalidRequestError(f"--prices: it is larger than {MOST_BYTES} bytes")
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"--prices: it is not JSON: {error}") from None
    allowed = ["version", "date", *PARTS]
    if not isinstance(table, dict) or not set(table) <= set(allowed):
        raise _refused("it", f"an object with {', '.join(allowed)}", table)
    if table.get("version") != 1:
        raise _refused("version", "1", table.get("version"))
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(table.get("date")), re.ASCII):
        raise _refused("date", "a day such as 2026-11-01", table.get("date"))
    prices = {part: table.get(part, {}) for part in PARTS}
    for part, by_name in prices.items():
        if not isinstance(by_name, dict):
            raise _refused(part, "an object with a price by name", by_name)
        for name, price in by_name.items():
            if type(price) not in {int, float} or not 0 <= price <= _HIGHEST:
                limits = f"a number from 0 to {_HIGHEST:g}"
                raise _refused(f"{part} of {shown(name)}", limits, price)
    return {"date": table["date"], **prices}


def _refused(name: str, must: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"--prices: {name} must be {must}, not {shown(value)}")


def cost_of(incarnations: Sequence[Incarnation], uri: str | None, prices: Prices) -> dict[str, Any]:
    """Return what is known of the cost by part, as a JSON value in US dollars."""
    amounts: dict[tuple[str, str], float] = defaultdict(float)
    scheme = uri.partition("://")[0] if uri and "://" in uri else "file"
    for each in incarnations:
        amounts["replica_hour", each.where] += (each.last - each.first) / 3600
        amounts["sent_gb", scheme] += each.bytes["sent"] / 1e9
        amounts["received_gb", scheme] += each.bytes["received"] / 1e9
    parts: list[dict[str, Any]] = []
    total: float | None = None
    for (part, name), amount in sorted(amounts.items()):
        known = prices[part]
        names = (name, name.partition("/")[0], "*")
        price = next((float(known[each]) for each in names if each in known), None)
        cost = None if price is None else price * amount
        total = total if cost is None else (total or 0.0) + cost
        parts.append({"part": part, "name": name, "amount": amount, "price": price, "cost": cost})
    return {"date": prices["date"], "known": total, "parts": parts}
