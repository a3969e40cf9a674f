"""Check what must hold after any simulated run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import filterfalse
from typing import Any

import torch

from diloco_core import Elastic, FencedError, Seconds
from diloco_core._run._records._keys import MANIFEST, Delta, commit_key, commit_sync, shard_key
from diloco_core._run._records._manifest import Manifest
from diloco_core._run._records._records import Commit, Rollback, digest, read_record
from diloco_core._run._records._rules import done_states, made_of

from ._recomputed import Recomputed, contributed, is_plain, lost_parts, recompute, was_passed
from ._simulation import Fixed, Outcome, Schedule, simulate
from ._store import SimulatedStore
from ._training import SimulatedTraining

_TOLERANCE = 1e-4
_ROUNDING = 1e-12
# Sums of these gradients are exact in these.
_EXACT_CODECS = ("plain", "fp32", "bf16", "fp16")
# Where another codec rounds values that lie between two of its steps, a difference of one bit
# decides for one or the other.
_TOLERANCE_OF_CODECS = 0.06


def violations(
    outcome: Outcome, training: SimulatedTraining, *, deadline: float = 700.0
) -> list[str]:
    """Return what a simulated run has done wrong; empty where nothing.

    Replicas at the same sync hold the same bytes, which are those that the log says: no
    contribution counted twice, half or not at all, and no batch learned twice by a rank. Their
    models hold what the rules of delay and mixing say. What a codec has lost of a contribution is
    sent later, never twice, and is not lost without a word. Contributions, and the steps taken
    while they were under way, tile the steps of an incarnation; shares are those of the
    contributions; and where syncs go by the time, each contribution is sent at the first boundary
    between two steps after it. The log is a chain, with a quorum in every record. An incarnation
    that has not agreed to go back does not go on after a rollback, and one that has a successor
    saves nothing. Encoded state follows from the state before it and the contributions, as
    published, to the last bit, and is the same bytes whenever it is written. No replica waits past
    the deadline. Every rank gets to the end, and no incarnation ends by an error unless a newer one
    took its place.

    Args:
        outcome: The run.
        training: What it trained.
        deadline: Virtual seconds that a replica may spend in one step.
    """
    problems = [
        f"incarnation {key} raised {error!r}"
        for key, error in outcome.errors().items()
        if not isinstance(error, FencedError)
    ]
    if not outcome.finished:
        problems.append(f"not every rank came to the end (virtual time {outcome.seconds:.0f} s)")
    problems += [
        f"{what} (rank {rank}, incarnation {incarnation})"
        for (rank, incarnation), wrong in training.mixed.items()
        for what in wrong
    ]
    if training.longest > deadline:
        problems.append(f"a replica waited for {training.longest:.0f} s")
    if MANIFEST not in outcome.store.decided:
        return [*problems, "there is no manifest"]
    if isinstance(outcome.store, CheckedStore):
        problems += outcome.store.broken
    problems += [f"{key} was written again with other content" for key in outcome.store.changed]
    problems += [
        f"{key} was saved by an incarnation that had a successor"
        for key in outcome.store.intrusions
    ]
    log, broken = read_log(outcome.store)
    problems += broken
    read = contributed(outcome.store, log, training.fragments) if training.sparse else {}
    lost = lost_parts(outcome.store, log, training.fragments)
    expected = training.expected(log, read, lost)
    exact = training.codec in _EXACT_CODECS or training.feedback.explains(log, training.salts)
    exact = (exact or training.sparse) and training.state_codec in {"plain", "fp32"}
    tolerance = _TOLERANCE if exact else _TOLERANCE_OF_CODECS
    recomputed = Recomputed()
    if not is_plain(training.state_codec) and training.fragments:
        recomputed = recompute(outcome.store, log, training.fragments, training.own)
        problems += recomputed.wrong
        made_again = filterfalse(partial(was_passed, outcome.store), outcome.store.differing)
        problems += [f"{key} was made again with other bytes" for key in made_again]
    for sync, states in [*sorted(training.states.items()), *sorted(training.entered.items())]:
        for rank, incarnation, copies in states:
            if not all(torch.equal(a, b) for a, b in zip(copies, states[0][2], strict=True)):
                problems.append(
                    f"after sync {sync}, rank {rank} (incarnation {incarnation}) differs from rank "
                    f"{states[0][0]}"
                )
            if not all(map(torch.equal, copies, recomputed.values.get(sync, copies))):
                problems.append(
                    f"after sync {sync}, rank {rank} (incarnation {incarnation}) does not hold "
                    "what was published"
                )
            if sync in expected:
                far = max(
                    float((a - b).abs().max()) for a, b in zip(copies, expected[sync], strict=True)
                )
                if not far < tolerance:
                    problems.append(
                        f"after sync {sync}, rank {rank} (incarnation {incarnation}) is {far:.3g} "
                        "off what the log says"
                    )
    steps = training.outer_steps(log)
    problems += [
        f"after sync {sync}, replicas count {sorted(counts)} outer steps, and the model has taken "
        f"{steps[sync]}"
        for sync, counts in sorted(training.steps.items())
        if sync in steps and counts != {steps[sync]}
    ]
    problems += training.feedback.wrong(log, training.salts)
    problems += learning_rates(log, training) + ignored_wishes(log, training)
    problems += wrong_steps(log, training) + wrong_windows(outcome.store, training)
    return problems + ignored_rollbacks(log, training) + learned_twice(log, training)


class CheckedStore(SimulatedStore):
    """Notes which deletions break a promise; what it notes is among the violations."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: list[str] = []
        self.after_delete = self._check

    def _check(self, keys: list[str]) -> None:
        self.broken += broken_promises(self, keys)


def flawless(
    training: SimulatedTraining, schedule: Schedule | int, settings: Elastic | Fixed, **options: Any
) -> Outcome:
    """Simulate a run in which nothing must go wrong; see :func:`.simulate`."""
    outcome = simulate(training, schedule, settings, **options)
    assert violations(outcome, training) == []
    return outcome


def wrong_steps(log: Sequence[Commit | Rollback], training: SimulatedTraining) -> list[str]:
    """Contributions that do not tile the steps of their incarnations, and reports with other shares
    or rates than the records.
    """
    problems = []
    commits = {record.sync: record for record in log if isinstance(record, Commit)}
    for (rank, incarnation), timeline in training.timelines.items():
        who = f"(rank {rank}, incarnation {incarnation})"
        claims = {
            sync: (member.start, member.stop)
            for sync, commit in commits.items()
            for member in commit.members
            if (member.rank, training.salts.get((rank, member.epoch))) == (rank, incarnation)
        }
        problems += [f"{what} {who}" for what in timeline.not_tiled(claims)]
        for adoption in timeline.adoptions:
            commit = commits.get(adoption.sync)
            if commit is None or adoption.weights is None:
                continue
            if adoption.lr not in {commit.rate.values[0], commit.rate.values}:
                problems.append(
                    f"sync {commit.sync} has {commit.rate}, and its report {adoption.lr} {who}"
                )
            if training.trim:
                continue
            weights = [training.weight_of(member) for member in commit.members]
            shares = [weight / sum(weights) for weight in weights]
            given = adoption.weights or [1 / len(weights)] * len(weights)
            if any(abs(a - b) > _ROUNDING for a, b in zip(given, shares, strict=True)):
                problems.append(
                    f"sync {commit.sync} has the shares {shares}, and its report {given} {who}"
                )
    return problems


def wrong_windows(store: SimulatedStore, training: SimulatedTraining) -> list[str]:
    """Contributions that were not sent at the first boundary after their window, where syncs go by
    the time.
    """
    if not isinstance(training.sync_every, Seconds):
        return []
    window = training.sync_every.value / len(training.sizes)
    sent = list(filter(None, (Delta.parse(key) for _, key, size in store.history if size)))
    problems = []
    for (rank, incarnation), timeline in training.timelines.items():
        stops = {
            delta.sync: delta.stop
            for delta in sent
            if (delta.rank, delta.epoch) == (rank, timeline.epoch)
        }
        problems += [
            f"{what} (rank {rank}, incarnation {incarnation})"
            for what in timeline.not_in_time(stops, window)
        ]
    return problems


def learning_rates(log: Sequence[Commit | Rollback], training: SimulatedTraining) -> list[str]:
    """Records whose outer learning rate is neither that of the record before, nor a wish, nor what
    an incarnation's function returns.
    """
    in_force: dict[int, Commit] = {}  # by fragment
    by_sync: dict[int, Commit] = {}
    steps, problems = training.outer_steps(log), []
    wishes = {(asked.rank, asked.epoch, asked.value) for asked in training.asked}
    for record in log:
        if isinstance(record, Rollback):
            in_force = {
                index: by_sync[sync] for index, sync in enumerate(record.states) if sync in by_sync
            }
            continue
        last = max(in_force.values(), key=lambda commit: commit.sync, default=None)
        in_force[record.fragment] = by_sync[record.sync] = record
        rates, number = record.rate.values, 0 if last is None else last.rate.number
        if record.rate.number == number > 0:
            right = last is not None and record.rate == last.rate
        elif record.rate.number == number:
            right = rates in {
                training.rates(rank, incarnation, steps[record.sync])
                for (rank, _), incarnation in training.salts.items()
            }
        else:
            wish = (record.rate.rank, record.rate.epoch, rates[0])
            right = record.rate.number == number + 1 and wish in wishes and len(set(rates)) == 1
        if not right:
            problems.append(f"record {record.sync} has the outer learning rate {record.rate}")
    return problems


def ignored_wishes(log: Sequence[Commit | Rollback], training: SimulatedTraining) -> list[str]:
    """Wishes that were made before a contribution, and that neither the record that counts it nor
    an earlier one has heard.
    """
    commits = [record for record in log if isinstance(record, Commit)]
    if len(commits) != len(log):
        return []  # where a run goes back, its learning rate goes back, too
    problems = []
    for asked in training.asked:
        counted = (
            commit
            for commit in commits
            for member in commit.members
            if (member.rank, member.epoch) == (asked.rank, asked.epoch) and member.stop > asked.step
        )
        first = next(counted, None)
        if first is not None and first.rate.number <= asked.number:
            problems.append(
                f"record {first.sync} counts a contribution of {asked}, and not its wish"
            )
    return problems


def ignored_rollbacks(log: Sequence[Commit | Rollback], training: SimulatedTraining) -> list[str]:
    """Incarnations that went on after a rollback that they had not agreed to."""
    fence: dict[int, int] = {}
    problems = []
    for record in log:
        if isinstance(record, Rollback):
            fence.update(record.fence)
            continue
        problems += [
            f"rank {member.rank} (epoch {member.epoch}) has not agreed to go back, and takes part "
            f"in sync {record.sync}"
            for member in record.members
            if member.epoch <= fence.get(member.rank, 0)
            and not training.agreed.get((member.rank, member.epoch), True)
        ]
    return problems


def learned_twice(log: Sequence[Commit | Rollback], training: SimulatedTraining) -> list[str]:
    """Return batches that more than one counted step of a rank has learned, unless given up."""
    given_up = {sync for record in log if isinstance(record, Rollback) for sync in record.given_up}
    seen: dict[tuple[int, int, int], int] = {}
    problems = []
    for commit in log:
        if isinstance(commit, Rollback) or commit.sync in given_up:
            continue
        for member in commit.members:
            incarnation = training.salts.get((member.rank, member.epoch), 0)
            for step in range(member.start, member.stop):
                batch = training.batches.get((member.rank, incarnation, step))
                if batch is None:
                    continue  # of a simulation before this one
                key = commit.fragment, member.rank, batch
                if key in seen:
                    problems.append(
                        f"rank {member.rank} learned batch {batch} in syncs {seen[key]} and "
                        f"{commit.sync}"
                    )
                seen[key] = commit.sync
    return problems


def read_log(store: SimulatedStore) -> tuple[list[Commit | Rollback], list[str]]:
    """All records of the log as they were decided, and what is wrong with them."""
    manifest = Manifest.from_json(store.decided[MANIFEST], MANIFEST)
    previous, problems, log = digest(store.decided[MANIFEST]), [], list[Commit | Rollback]()
    positions: dict[tuple[int, int], Mapping[int, int]] = {}  # by fragment and sync
    newest = [0] * len(manifest.fragments)
    decided = {
        sync: data for key, data in store.decided.items() if (sync := commit_sync(key)) is not None
    }
    records = {sync: read_record(data, sync, commit_key(sync)) for sync, data in decided.items()}
    rollbacks = [record for record in records.values() if isinstance(record, Rollback)]
    # In place of a record that was lost there is a rollback, and a newer one has given up its
    # number.
    lost = {record.sync for record in rollbacks} & {
        sync for record in rollbacks for sync in record.given_up
    }
    while (record := records.get(len(log) + 1)) is not None:
        log.append(record)
        if record.run != manifest.run():
            problems.append(f"record {record.sync} is of another run")
        if isinstance(record, Rollback):
            newest = list(record.states)
        else:
            if record.previous != previous and record.sync - 1 not in lost:
                problems.append(f"record {record.sync} does not follow the one before")
            ranks = [member.rank for member in record.members]
            if len(set(ranks)) < manifest.min_replicas or ranks != sorted(set(ranks)):
                problems.append(f"record {record.sync} has members {ranks}")
            counted = positions.get((record.fragment, newest[record.fragment]), {})
            problems += [
                f"record {record.sync} counts steps of rank {member.rank} twice"
                for member in record.members
                if member.start < counted.get(member.rank, 0)
            ]
            newest[record.fragment] = record.sync
            positions[record.fragment, record.sync] = {
                **counted,
                **{m.rank: m.stop for m in record.members},
            }
        previous = digest(decided[record.sync])
    return log, problems


def broken_promises(store: SimulatedStore, removed: Iterable[str] = ()) -> list[str]:
    """What is missing in a store: to go on with its run, or for an incarnation that lags no more
    than it may.

    The two newest complete states of every fragment must be there (the initial one is one) with all
    that they are made of, and everything that was committed after the older of them. Published
    states of the last ``retention`` syncs must stay, in the gather topology contributions too.

    Args:
        store: The store.
        removed: What has just been deleted there.
    """
    if MANIFEST not in store.objects:
        return []
    manifest = Manifest.from_json(store.decided[MANIFEST], MANIFEST)
    count = len(manifest.fragments)
    kept = len(store.below("commits/")) - manifest.retention
    folders = ("state", "deltas") if manifest.topology == "gather" else ("state",)
    problems = [
        f"{key} was removed too early"
        for key in removed
        if key.partition("/")[0] in folders and int(key.split("/")[1]) > kept
    ]
    log, _ = read_log(store)
    # An end gives nothing up, and the newest state that it names may still have to be finished.
    rollbacks = [record for record in log if isinstance(record, Rollback) and record.end is None]
    given_up = {sync for rollback in rollbacks for sync in rollback.given_up}
    for index, states in enumerate(done_states(store.objects, count, rollbacks)):
        newest = (
            rollbacks[-1] if rollbacks else Rollback(0, (0,) * count, (), {}, run=manifest.run())
        )
        two = sorted(
            {newest.states[index], *(sync for sync in states if sync > newest.sync)}, reverse=True
        )[:2]
        shards = range(manifest.fragments[index]["shards"])
        every = int(manifest.settings.get("full_state_every", "1"))
        needed = {part for sync in two for part in made_of(sync, index, count, every, rollbacks)}
        keys = [
            shard_key(sync, index, shard, manifest.initial) for sync in needed for shard in shards
        ]
        for record in log:
            if isinstance(record, Rollback) or record.sync in given_up:
                continue
            if record.fragment == index and record.sync > two[-1]:
                keys += [member.key for member in record.members]
        problems += [
            f"{key} is gone, and fragment {index} (states {two}) needs it"
            for key in keys
            if key not in store.objects and f"kept/{key}" not in store.objects
        ]
    return problems
