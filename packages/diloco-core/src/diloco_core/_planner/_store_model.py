"""How a store behaves, as one replica sees it: what a plan is told of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .._checks import check_positive, check_whole, kind_of
from .._errors import ConfigurationError

READS = ("GET", "LIST")
"""Kinds of requests that count towards the rate of reads; all others count as writes."""


@dataclass(frozen=True, slots=True)
class HttpBytes:
    """What a request moves besides the content of objects, in bytes, where the store speaks HTTP as S3 does.

    The figures were counted on the sockets between obstore 0.12 and moto's S3 (5.2) on a loopback port, with a short bucket
    and prefix, plain HTTP and credentials without a session token. ``tests/store/test_planned.py`` counts them again. They
    were not measured on AWS, whose answers have other headers. A session token of some hundred bytes or more is in every
    request; add it to ``request`` and ``deletion``. What TLS, TCP and IP add (a few percent) is in no plan.

    Attributes:
        request: A request without its key and content.
        answer: The answer to a GET without the content.
        written: The answer to a PUT.
        absent: The answer to a GET if there is no such object.
        listing: The answer to a LIST without its keys.
        listed: What it has of a key besides its name.
        deletion: A DELETE of several objects, without their keys.
        deletion_answer: Its answer, without their keys.
        deleted: What both have of a key besides its name.
    """

    request: float = 405.0
    answer: float = 460.0
    written: float = 365.0
    absent: float = 630.0
    listing: float = 540.0
    listed: float = 190.0
    deletion: float = 660.0
    deletion_answer: float = 385.0
    deleted: float = 32.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _check_amount(name, getattr(self, name))


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
            (https://aws.amazon.com/s3/pricing/), which are 2e-11 and 9e-11 dollars per byte. AWS does not say whether headers
            count; here they do.
        http: What a request moves besides the content of objects; None if that is nothing, as in a folder.
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
    http: HttpBytes | None = field(default_factory=HttpBytes)

    def __post_init__(self) -> None:
        check_positive("connection_bandwidth", self.connection_bandwidth)
        check_whole("page", self.page)
        for name in ("reads", "writes"):
            if getattr(self, name) is not None:
                check_positive(
                    name, getattr(self, name), " of requests per second, or None for no limit"
                )
        for name in ("first_byte", "put", "poll", "put_price", "get_price", "egress_price"):
            _check_amount(name, getattr(self, name))
        if self.http is not None and not isinstance(self.http, HttpBytes):
            raise ConfigurationError(f"http must be HttpBytes or None, not {kind_of(self.http)}")

    def latency(self, kind: str) -> float:
        """Seconds that a request takes in addition to its transfer."""
        return self.first_byte if kind in READS else self.put

    def rate(self, kind: str) -> float:
        """How many requests of this kind the prefix accepts per second."""
        rate = self.reads if kind in READS else self.writes
        return math.inf if rate is None else rate

    def around(
        self, kind: str, key: float, keys: float = 0.0, *, absent: bool = False
    ) -> tuple[float, float]:
        """Bytes that a request sends and receives besides the content of an object.

        Args:
            kind: The kind of the request.
            key: The length of a key.
            keys: How many keys a LIST or DELETE is about.
            absent: Whether there is no such object.
        """
        http = self.http
        if http is None:
            return 0.0, 0.0
        if kind == "DELETE":
            names = keys * (http.deleted + key)
            return http.deletion + names, http.deletion_answer + names
        if kind == "LIST":
            return http.request, http.listing + keys * (http.listed + key)
        if kind == "PUT":
            return http.request + key, http.written
        return http.request + key, http.absent if absent else http.answer


def _check_amount(name: str, value: object) -> None:
    """Refuse what is not a number of at least 0.

    Raises:
        ConfigurationError: The message names it.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} must be a number, 0 or more, not {value!r}")
