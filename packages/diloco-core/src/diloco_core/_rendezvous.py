"""How the replicas of a strict run meet: every rank claims its place once, then all check that they agree."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._errors import (
    ConfigurationError,
    MismatchError,
    ObjectNotFoundError,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
)
from ._exchange import Schema
from ._timing import Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._store import Store
    from ._timing import Timing

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """What a rank declares when it joins."""

    rank: int
    world_size: int
    run_id: str
    schema: Schema
    nonce: str
    host: str
    pid: int

    def to_json(self) -> bytes:
        """The claim as stored."""
        record = {
            "format": _FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "run_id": self.run_id,
            "tensors": dict(self.schema.tensors),
            "settings": dict(self.schema.settings),
            "nonce": self.nonce,
            "host": self.host,
            "pid": self.pid,
        }
        return json.dumps(record, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, key: str) -> Claim:
        """Read a stored claim.

        Raises:
            RunExistsError: It is none, so that the prefix holds something else.
        """
        try:
            record: dict[str, Any] = json.loads(data)
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']} is not {_FORMAT}")
            schema = Schema(record["tensors"], record["settings"])
            return cls(
                record["rank"],
                record["world_size"],
                record["run_id"],
                schema,
                record["nonce"],
                record["host"],
                record["pid"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RunExistsError(
                f"{key} is no claim that this version understands ({error}). Use a prefix of its own for every run."
            ) from error


def claim(store: Store, rank: int, world_size: int, run_id: str, schema: Schema) -> Claim:
    """Take a rank's place in the run, once and for all.

    Args:
        store: The run's prefix.
        rank: This replica.
        world_size: How many there are.
        run_id: The launch they belong to, or "".
        schema: What they must have in common.

    Raises:
        RunExistsError: The rank has been claimed before.
    """
    if any(key.count("/") > 1 for key in store.list("claims/")):
        raise RunExistsError(
            f"{store.uri} holds an elastic run, which no strict replica can join: pass min_replicas=, or use another prefix"
        )
    own = Claim(rank, world_size, run_id, schema, secrets.token_hex(8), socket.gethostname(), os.getpid())
    if not store.create(claim_key(rank), own.to_json()):
        _refuse(store, own)
    return own


def meet(store: Store, own: Claim, timing: Timing, check_failures: Callable[[], object]) -> None:
    """Wait for all other ranks, and compare.

    Args:
        store: The run's prefix.
        own: What :func:`claim` returned.
        timing: Limits and clock.
        check_failures: Raises if another rank has failed already.

    Raises:
        RunExistsError: The rank is claimed by somebody else, or the prefix is used by another run too.
        RendezvousTimeoutError: Some ranks did not come; it names them.
        MismatchError: The replicas disagree; it says on what.
    """
    claims: dict[int, Claim] = {own.rank: own}

    def missing() -> list[int]:
        return [r for r in range(own.world_size) if r not in claims]

    def read_claims() -> None:
        for key in store.list("claims/"):
            number = key.removeprefix("claims/").removesuffix(".json")
            if not number.isdecimal() or int(number) not in claims:
                other = Claim.from_json(store.get(key), f"{store.uri}/{key}")
                _compare(own, other, store.uri)
                claims[other.rank] = other

    def look_around() -> None:
        try:
            check_failures()
        except ReplicaLostError:
            read_claims()  # if it failed because we disagree, that is what should be said
            raise

    def expired() -> Exception:
        ranks = ", ".join(str(r) for r in missing())
        return RendezvousTimeoutError(
            f"{len(claims)} of {own.world_size} replicas met at {store.uri} within {timing.join_timeout:g} s; "
            f"missing: rank {ranks}. Look at the logs of the missing ranks, and whether they were given the same URI "
            "and world size.",
            missing(),
        )

    wait = Wait(timing, store.near, timing.join_timeout, look_around, expired)
    read_claims()
    while missing():
        wait.pause()
        read_claims()
    # A store without exclusive creation may have let somebody else overwrite the claim.
    if Claim.from_json(store.get(claim_key(own.rank)), claim_key(own.rank)).nonce != own.nonce:
        _refuse(store, own)


def claim_key(rank: int) -> str:
    """Key of the claim of a rank."""
    return f"claims/{rank:05}.json"


def _refuse(store: Store, own: Claim) -> None:
    try:
        other = Claim.from_json(store.get(claim_key(own.rank)), f"{store.uri}/{claim_key(own.rank)}")
    except ObjectNotFoundError:
        raise RunExistsError(f"the claim of rank {own.rank} in {store.uri} was refused and then vanished") from None
    whose = f"run {other.run_id!r}" if other.run_id else "an earlier run"
    if own.run_id and other.run_id == own.run_id:
        whose = "an earlier life of this rank in the same run (strict membership knows no second life)"
    raise RunExistsError(
        f"rank {own.rank} of {store.uri} is taken by {whose}: process {other.pid} on {other.host}. "
        "Give every run a prefix of its own; if that run is over and not needed, delete the prefix."
    )


def _compare(own: Claim, other: Claim, uri: str) -> None:
    if other.run_id != own.run_id:
        raise RunExistsError(
            f"{uri} is used by two runs: rank {other.rank} belongs to run {other.run_id!r}, this replica to {own.run_id!r}. "
            "Give every run a prefix of its own."
        )
    if other.world_size != own.world_size:
        raise MismatchError(
            f"rank {other.rank} was started with world size {other.world_size}, rank {own.rank} with {own.world_size}"
        )
    compare_schemas(own.rank, own.schema, other.rank, other.schema)


def compare_schemas(rank: int, mine: Schema, other: int, theirs: Schema) -> None:
    """Refuse replicas that differ.

    Raises:
        MismatchError: It names the first setting or tensor that differs, and both values.
    """
    pairs = (("setting", mine.settings, theirs.settings), ("tensor", mine.tensors, theirs.tensors))
    for what, here, there in pairs:
        for name in [*here, *(name for name in there if name not in here)]:
            if here.get(name) != there.get(name):
                raise MismatchError(
                    f"rank {rank} and rank {other} differ in {what} {name!r}: "
                    f"{here.get(name, 'absent')} at rank {rank}, {there.get(name, 'absent')} at rank {other}"
                )
        if list(here) != list(there):
            raise MismatchError(f"rank {rank} and rank {other} have the same {what}s in another order")


def check_identity(rank: int, world_size: int) -> None:
    """Refuse impossible ranks.

    Raises:
        ConfigurationError: ``rank`` is not in ``range(world_size)``.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ConfigurationError(f"world_size must be a whole number of at least 1, not {world_size!r}")
    if not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ConfigurationError(f"rank must be one of 0 … {world_size - 1} (world_size is {world_size}), not {rank!r}")
