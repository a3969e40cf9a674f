"""How a store behaves, as one replica sees it: what a plan is told of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._checks import check_positive, check_whole
from .._errors import ConfigurationError

READS = ("GET", "LIST")
"""Kinds of requests that count towards the rate of reads; all others count as writes."""


@dataclass(frozen=True, slots=True)
class StoreModel:
    """How a store behaves, as one replica sees it. How many requests are under way at once depends on the code, not on the store.

    Attributes:
        connection_bandwidth: Bytes per second of one connection.
        first_byte: Seconds from a GET or LIST to the first byte of the answer.
        put: Seconds that a PUT or DELETE takes in addition to its transfer.
        poll: Seconds that a replica which waits for the others needs to notice that they are done.
        reads: GET and LIST requests per second that the run's prefix accepts from all replicas together; None for no limit.
        writes: PUT and DELETE requests per second that it accepts from all replicas together; None for no limit.
        page: The most keys in one answer to a LIST.
        put_price: US dollars per PUT or LIST.
        get_price: US dollars per GET.
        egress_price: US dollars per byte that a replica receives: 0, where the replicas are in the store's region. Clouds charge
            for what leaves a region: AWS lists 0.02 dollars per GB to another of its regions and 0.09 to the internet
            (https://aws.amazon.com/s3/pricing/), which are 2e-11 and 9e-11 dollars per byte.
    """

    connection_bandwidth: float = 90e6
    first_byte: float = 0.025
    put: float = 0.040
    poll: float = 0.05
    reads: float | None = 5500.0
    writes: float | None = 3500.0
    page: int = 1000
    put_price: float = 5e-6
    get_price: float = 4e-7
    egress_price: float = 0.0

    def __post_init__(self) -> None:
        check_positive("connection_bandwidth", self.connection_bandwidth)
        check_whole("page", self.page)
        for name in ("reads", "writes"):
            if getattr(self, name) is not None:
                check_positive(
                    name, getattr(self, name), " of requests per second, or None for no limit"
                )
        for name in ("first_byte", "put", "poll", "put_price", "get_price", "egress_price"):
            check_amount(name, getattr(self, name))

    def latency(self, kind: str) -> float:
        """Seconds that a request takes in addition to its transfer."""
        return self.first_byte if kind in READS else self.put

    def rate(self, kind: str) -> float:
        """How many requests of this kind the prefix accepts per second."""
        rate = self.reads if kind in READS else self.writes
        return math.inf if rate is None else rate


def check_amount(name: str, value: object, unit: str = "") -> None:
    """Refuse what is not a number of at least 0.

    Raises:
        ConfigurationError: The message names it.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} must be a number{unit}, 0 or more, not {value!r}")
