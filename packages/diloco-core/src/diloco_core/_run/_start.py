"""The beginning of an incarnation, which reads the run's manifest or creates it.

The replica that begins a run writes a sign before it uploads anything, and repeats it while the
upload lasts. No common clock is needed: the others see that the sign has changed, and measure the
time since then with their own clocks.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .._arithmetic._rate import NO_RATE
from .._errors import CorruptedObjectError, RendezvousTimeoutError, RunExistsError
from .._exchange._base import Schema
from .._exchange._resumable import ResumableJob
from .._planner._plan import USUAL_BANDWIDTH, plan_exchange
from .._store._patient import Patient
from .._store._reread import copy_key, read_again
from .._wire._published import Sums
from ._claims import newest_epoch
from ._compare import check_same_run
from ._policy._ends import nothing_to_resume
from ._policy._meeting import check_failures, shards_of_all, sums_of_all, upload, upload_own
from ._records._keys import BEGINNING, MANIFEST, commit_sync, is_claim
from ._records._manifest import Manifest
from ._records._rules import states
from ._settings import Joiner

# Signs in a grace. A few may be late or not be seen before other replicas consider the sender dead.
_SIGNS = 4
_LOOKS = 8  # in a grace
_LOOK_SECONDS = 2.0
_STAGGER = 0.5
_LARGEST = 4096

_log = logging.getLogger("diloco_core")


@dataclass(frozen=True, slots=True)
class Opening:
    """A replica that opens a run.

    Attributes:
        store: The run's prefix.
        jobs: All fragments, in the order in which they are synced.
        schema: What all replicas must have in common.
        joiner: This replica.
        loaded: The name of the state that was loaded, if one was. The others have to upload their
            parts of it, too.
    """

    store: Patient
    jobs: Sequence[ResumableJob]
    schema: Schema
    joiner: Joiner
    loaded: str

    def manifest(self) -> Manifest:
        """The run's manifest.

        If no other replica creates it, this one does, after uploading its initial state.

        Rank 0 uploads its initial state at once. The others wait; if for a grace no replica has
        shown that it is uploading, one of them uploads its own. The replica that creates the
        manifest decides: all replicas take the state that it names.

        Raises:
            RendezvousError: There is no run to resume.
            RunExistsError: The prefix belongs to another run.
            MismatchError: This replica has another model or other settings.
            ConfigurationError: A setting has no effect in the topology that ``auto`` chooses.
        """
        store, schema, joiner = self.store, self.schema, self.joiner
        rank, settings = joiner.rank, joiner.settings
        manifest = _read_or_restore(store)
        if manifest is None and settings.resume:
            _check_unused(store)
            raise nothing_to_resume(store, f": there is no {MANIFEST}")
        if manifest is None:
            # Before any replica waits: those with the same settings are refused at the same time.
            topology = self._topology()
        if manifest is None and rank != 0:
            if self.loaded:
                upload_own(store, self.jobs, self.loaded, joiner)

            def look_around() -> None:
                """Raise an error if it is of no use to wait for rank 0 of a fixed run.

                What refuses rank 0 silently refuses this rank, too.
                """
                if settings.fixed:
                    check_failures(store, rank, committed_in(schema) + 1)
                    _check_unused(store)

            manifest = wait_for_manifest(store, joiner, look_around)
        if manifest is None:
            manifest = self._begin(topology)
        first = settings.fixed and not newest_epoch(store, rank)
        check_same_run(manifest, schema, joiner, uri=store.uri, first=first)
        # Only the first incarnation of rank 0 expects that its initial values are used.
        if rank == 0 and manifest.writer != 0 and not newest_epoch(store, 0):
            _log.warning(
                "rank 0: the run at %s was begun by rank %d with the initial values of that rank, "
                "as rank 0 had given no sign for a grace. Those of this replica are not used.",
                store.uri,
                manifest.writer,
            )
        return manifest

    def _begin(self, topology: str) -> Manifest:
        """Begin the run with this replica's initial state.

        Returns its manifest: another replica may be faster.
        """
        store = self.store
        _check_unused(store)
        _remove_leftover(store)
        with beginning(store, self.joiner):
            own_manifest = self._initial(topology)
            store.create(MANIFEST, own_manifest.to_json)
        manifest = read_manifest(store)
        if manifest is None:
            raise CorruptedObjectError(
                f"{store.uri}/{MANIFEST} was created, but is not there any more: something else "
                "has deleted it. Find out what does, and start again."
            )
        if manifest.initial == own_manifest.initial:
            store.put(copy_key(MANIFEST), lambda: [own_manifest.to_json()])
        else:
            # The state that this replica uploaded is not used.
            store.delete(store.list(f"initial/{own_manifest.initial}/"))
            if own_manifest.unsynced:
                store.delete(store.list(f"{own_manifest.unsynced['folder']}/"))
        return manifest

    def _topology(self) -> str:
        """Return the topology of a run that this replica begins.

        Over a network, ``auto`` chooses the quicker one according to :func:`plan_exchange`. Gather
        saves round trips and most publications of the state, but every replica reads every
        contribution and keeps all of the outer state: it suits small models and few replicas. With
        a faster network it suits larger runs too. The network is not known here, so a modest one is
        assumed. On a store whose requests cost nothing, sharded is never slower; and only sharded
        publishes state encoded.

        Settings that have no effect in it are refused.
        """
        store, terms, settings = self.store, self.schema.terms, self.joiner.settings
        topology = settings.topology
        if topology == "auto" and (store.near or terms.coding is not None):
            topology = "sharded"
        if topology == "auto":
            background = store.store.background
            groups = [job.layout.groups for job in self.jobs]
            sizes = [sum(part.numel * part.dtype.itemsize for part in each) for each in groups]
            topology = plan_exchange(
                max(max(sizes) / 4, 1),
                self.joiner.world_size,
                USUAL_BANDWIDTH,
                outer_state=self.schema.outer_state(),
                publish_every=settings.publish_every,
                transfer=None if background is None else background.settings,
                codec=terms.codec,
            ).topology
        settings.check_chosen(topology)
        return topology

    def _initial(self, topology: str) -> Manifest:
        """Upload this replica's initial state.

        Returns the manifest that names it, which is not written yet.

        If it was loaded (``loaded`` is the name of the state), the others have uploaded their parts
        of it.
        """
        store, schema, joiner, settings = self.store, self.schema, self.joiner, self.joiner.settings
        # Plain means have no state.
        stateful = [] if schema.settings.get("operation") else self.jobs
        nonce = self.loaded or secrets.token_hex(8)
        if self.loaded:
            written = sums_of_all(store, stateful, nonce, joiner)
        else:
            numbers = shards_of_all(stateful)
            written = upload(store, stateful, nonce, numbers, joiner.chunk_bytes)
        sums: list[list[Sums]] = [[] for _ in stateful]
        for index, number in sorted(written):
            sums[index].append(written[index, number])
        return Manifest(
            run_id=joiner.run_id,
            writer=joiner.rank,
            world_size=joiner.world_size,
            min_replicas=settings.min_replicas,
            topology=topology,
            publish_every=settings.published_every,
            retention=settings.retention,
            settings=dict(schema.settings),
            tensors=dict(schema.tensors),
            fragments=[dict(table) for table in schema.fragments],
            initial=nonce,
            sums=[[shard_sums.values for shard_sums in row] for row in sums],
            rests=[[shard_sums.rest for shard_sums in row] for row in sums],
            unsynced={} if schema.unsynced is None else schema.unsynced.publish(store.put),
            membership="fixed" if settings.fixed else "elastic",
            rate=self.jobs[0].rate if self.loaded else NO_RATE,
        )


@contextmanager
def beginning(store: Patient, joiner: Joiner) -> Iterator[None]:
    """Show the other replicas that this one uploads the initial state, so that they wait.

    It does so as long as this context lasts.
    """
    nonce, count = secrets.token_hex(8), itertools.count()

    def give_sign() -> None:
        sign = {"rank": joiner.rank, "run_id": joiner.run_id, "nonce": nonce, "sign": next(count)}
        store.put(BEGINNING, lambda: [json.dumps(sign).encode()])

    give_sign()
    seconds = min(store.timing.beat_interval, joiner.settings.grace / _SIGNS)
    failure = (
        f"rank {joiner.rank} could not show the others, one of which begins the run if it sees no "
        "sign for a grace, that it is uploading the initial state of the run"
    )
    stop = store.repeat(seconds, give_sign, failure)
    try:
        yield
    finally:
        stop()
    store.delete([BEGINNING])


def wait_for_manifest(
    store: Patient, joiner: Joiner, look_around: Callable[[], None]
) -> Manifest | None:
    """Wait for the manifest. Returns it, or None if this replica should begin the run.

    It should if, for a grace, it has seen no sign that another replica begins the run. The ranks
    stop waiting one after another, so that only one of them begins the run if rank 0 does not come.
    In a fixed run no other rank begins in the place of rank 0.

    Args:
        store: Where it will be.
        joiner: This replica; not rank 0, which does not wait.
        look_around: Called from time to time; raises an error if waiting any longer is of no use.

    Raises:
        RendezvousTimeoutError: There is no manifest after ``join_timeout``, and no sign was seen
            for that time either.
    """
    rank, timing = joiner.rank, store.timing
    grace = math.inf if joiner.settings.fixed else joiner.settings.grace
    last_sign: bytes | None = None
    last_sign_at: float | None = None  # seconds since the wait began

    def timed_out() -> Exception:
        return RendezvousTimeoutError(
            f"no replica began the run at {store.uri} within {timing.join_timeout:g} s. Look at "
            "the log of rank 0, which usually begins the run. A larger join_timeout gives it more "
            "time.",
            [0],
        )

    def notice(seconds: float) -> str:
        progress = "no replica has begun it yet"
        if last_sign_at is not None:
            sign = f"gave its last sign {seconds - last_sign_at:.0f} s ago"
            progress = f"another replica is uploading the initial state, and {sign}"
        return f"rank {rank} has waited {seconds:.0f} s for {store.uri} to begin: {progress}"

    wait = store.wait(timing.join_timeout, timed_out, look_around, notice=notice)
    patience = grace + (rank - 1) * min(_STAGGER, grace / max(10, joiner.world_size))
    turn, look_at = patience, 0.0
    while (manifest := read_manifest(store)) is None:
        now = wait.elapsed()
        if now >= min(look_at, turn):
            look_at = now + min(_LOOK_SECONDS, grace / _LOOKS)
            sign = store.peek(BEGINNING, _LARGEST)
            # What the sign says does not matter: if its sender begins another run, or has another
            # version, the manifest will show it.
            if sign and sign != last_sign:
                last_sign, last_sign_at, turn = sign, now, now + patience
                wait.extend()
        if now >= turn:
            reason = (
                "no replica has begun the run at %s"
                if last_sign_at is None
                else "the replica that was beginning the run at %s has given no sign"
            )
            message = (
                f"rank %d: {reason} within the grace of %g s, so this replica begins it with its "
                "own initial values"
            )
            _log.warning(message, rank, store.uri, grace)
            return None
        wait.pause()
    return manifest


def committed_in(schema: Schema) -> int:
    """The number of outer steps that a model had taken when its run began."""
    return int(schema.settings.get("committed", "0"))


def read_manifest(store: Patient) -> Manifest | None:
    """The manifest; None if there is none.

    Raises:
        CorruptedObjectError: It is damaged in the store.
        FormatError: Another version has written it.
    """
    try:
        return stored_manifest(store)
    except CorruptedObjectError as error:
        raise _unreadable(error) from error


def _read_or_restore(store: Patient) -> Manifest | None:
    """The manifest; None if there is none.

    If it is damaged or gone, it is written again from its copy.

    Raises as :func:`read_manifest` does.
    """
    damage: CorruptedObjectError | None = None
    try:
        manifest = stored_manifest(store)
        if manifest is not None:
            return manifest
    except CorruptedObjectError as error:
        damage = error
    key = copy_key(MANIFEST)
    try:
        copy = stored_manifest(store, key)
    except CorruptedObjectError:
        copy = None
    if damage is not None and copy is None:
        raise _unreadable(damage) from damage
    if damage is None and copy is not None:
        # The replica that begins the run may have written both since: the manifest first, and then
        # the copy.
        manifest = read_manifest(store)
        if manifest is not None:
            return manifest
    # Without anything else of the run, the copy is only a leftover, and a new run may begin.
    if copy is None or (damage is None and not _remains(store)):
        return None
    _log.error(
        "%s. It is written again from its copy %s. Something outside this run deletes or changes "
        "its objects: find out what does, and stop it.",
        f"{store.uri}/{MANIFEST} is gone" if damage is None else str(damage).rstrip("."),
        key,
    )
    if damage is None:
        store.create(MANIFEST, copy.to_json)
    else:
        store.put(MANIFEST, lambda: [copy.to_json()])
    return read_manifest(store)


def _unreadable(damage: CorruptedObjectError) -> CorruptedObjectError:
    return CorruptedObjectError(
        f"{str(damage).rstrip('.')}. Without this object or its copy {copy_key(MANIFEST)} nothing "
        "of the run can be read, and resume='newest-whole' does not help. If a replica of the run "
        "is still running, that replica will write the object again: start this one later. "
        "Otherwise restore it from a backup, or begin a new run on another prefix."
    )


def stored_manifest(store: Patient, key: str = MANIFEST) -> Manifest | None:
    """The manifest under its key, or under that of its copy; None if there is none.

    Raises as :func:`read_manifest` does.
    """

    def read() -> Manifest | None:
        data = store.get(key)
        return None if data is None else Manifest.from_json(data, f"{store.uri}/{key}")

    return read_again(store.timing, read)


def _remains(store: Patient) -> list[str]:
    """Return the keys of objects that a run writes only when its manifest is there."""
    remains = list(filter(is_claim, store.list("claims/")))
    remains += filter(commit_sync, store.list("commits/"))
    return remains or [key for key in store.list("state/") if any(states([key]))]


def _check_unused(store: Patient) -> None:
    """Refuse to begin a run where objects of another run are left."""
    # A run that has not created its manifest yet has written only initial states. A replica that
    # began the run at the same moment and was faster has created the manifest by now.
    remains = _remains(store)
    if remains and store.peek(MANIFEST) is None:
        raise RunExistsError(
            f"{store.uri} holds objects of an earlier run (such as {remains[0]}), but its "
            f"{MANIFEST} is missing, and its copy is missing or damaged. To continue that run, put "
            "the manifest back (replicas that are still running do so every few syncs). To begin a "
            "new run, use another prefix, or delete everything below this one."
        )


def _remove_leftover(store: Patient) -> None:
    """Delete a leftover copy of an earlier run's manifest.

    It would be believed if this process died before it has written its own.
    """
    key = copy_key(MANIFEST)
    if store.read(key, lambda _: True) and store.peek(MANIFEST) is None:
        store.delete([key])
