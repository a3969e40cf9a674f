"""One incarnation in the model of a run: it walks the real decision functions, one request at a
time; see :mod:`round_lab`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diloco_core._run._records import _rules as rules
from diloco_core._run._records._keys import (
    Delta,
    Hint,
    claim_key,
    commit_key,
    deltas,
    done_key,
    epochs,
    shard_key,
)
from diloco_core._run._records._records import Commit, Done, digest, state_digest
from diloco_core._run._round import _membership as membership
from diloco_core._run._round import _shares
from diloco_core._run._round._membership import Create, Differ, Expired, Leave, Obey, Round
from diloco_core._run._round._shares import Shares

RUN, SCHEMA, NONCE = "b" * 16, "f" * 16, "a" * 16
SIZE, GRACE = 100, 10.0
REMEMBERED = 12  # how many writes a listing may be behind


class Violation(AssertionError):
    """Something that must never happen."""


class Replaced(Exception):
    """A newer incarnation of the rank has taken over."""


class Gone(Exception):
    """Raised when newer state is complete, and an incarnation's own is gone: it loads again."""


@dataclass(frozen=True)
class Request:
    """One request to the store; an incarnation stands still until the world has carried it out."""

    kind: str
    key: Any
    data: Any = None


@dataclass
class State:
    """The state of an incarnation: the counted batches of each shard, and its place in the log."""

    sync: int = 0
    values: list = field(default_factory=list)
    commit: Commit | None = None
    previous: str = RUN
    members: dict = field(default_factory=dict)

    @property
    def sums(self):
        return tuple(checksum(value) for value in self.values)

    @property
    def positions(self):
        return self.commit.positions if self.commit else {}

    def follows(self, commit):
        counted = {**self.positions, **{member.rank: member.stop for member in commit.members}}
        return (commit.sync, commit.previous) == (self.sync + 1, self.previous) and (
            commit.positions == counted
        )


def checksum(value):
    """Of a shard."""
    return int(digest(repr(value).encode()), 16)


class Incarnation:
    """One incarnation of a rank. ``request`` is what it is about to do; None when it has ended."""

    def __init__(self, world, rank, name):
        self.world, self.rank, self.name = world, rank, name
        self.epoch, self.state, self.absent = 0, State(), set()
        self.overdue, self.expired, self.elapsed = False, False, 0.0
        self.flips = self.differed = False
        self.learned: list = []
        self.next = 0
        self.is_new = True  # none of its own contributions was counted
        self._program = self._live()
        self.request = next(self._program)

    def go_on(self, answer):
        """Hand over the answer to its request."""
        try:
            self.request = self._program.send(answer)
        except StopIteration:
            self.request = None

    def _live(self):
        try:
            yield from self._join()
        except Replaced:
            return

    def _check_claim(self):
        if (yield Request("get", claim_key(self.rank, self.epoch + 1))) is not None:
            raise Replaced

    def _differ(self):
        """Only an incarnation that has been replaced may hold another state than the log names, and
        only in a fixed run.
        """
        if self.world.fixed:
            yield from self._check_claim()
        raise Violation(f"incarnation {self.name} holds another state after sync {self.state.sync}")

    def _join(self):
        yield from self._claim()
        yield from self._catch_up()
        first = True
        while True:
            yield from self._check_claim()
            sync = self.state.sync + 1
            if (
                not self.world.fixed
                and (yield Request("get", commit_key(sync))) is None
                and self.epoch not in {self.state.members.get(self.rank)}
            ):
                yield Request("put", Hint(sync, self.rank, self.epoch, "join").key, "hint")
            try:
                stands_in = self.is_new if self.world.fixed else first
                if not (yield from self._sync(stands_in=stands_in)):
                    yield Request("put", Hint(sync, self.rank, self.epoch, "leave").key, "hint")
                    return
                self.differed = False
            except Gone:
                yield from self._catch_up()
            first = False

    def _claim(self):
        listing = yield Request("list", "claims/")
        epoch = max(epochs(listing, self.rank), default=0) + 1
        while True:
            created = yield Request("create", claim_key(self.rank, epoch), self.name)
            if created:
                break
            if (yield Request("get", claim_key(self.rank, epoch))) == self.name:
                break
            epoch += 1
        self.epoch = epoch

    def _catch_up(self):
        while not (yield from self._load()):
            pass
        while (record := (yield Request("get", commit_key(self.state.sync + 1)))) is not None:
            try:
                commit = self.world.record(record)
                if commit.base != state_digest(self.state.sums):
                    yield from self._differ()
                yield from self._adopt(commit)
            except Gone:
                return (yield from self._catch_up())
        self.learned = []
        self.next = max(self.next, self.state.positions.get(self.rank, 0))
        return None

    def _load(self):
        newest = rules.newest_done((yield Request("list", "state/")), 1)[0]
        done = (yield Request("get", done_key(newest, 0))) if newest else None
        values = []
        for shard in range(self.world.shards):
            value = yield Request("get", shard_key(newest, 0, shard, NONCE))
            if value is None or (newest and done is None):
                return False
            values.append(value)
        if not newest:
            self.state = State(0, values, None, RUN, dict.fromkeys(self.world.ranks, 0))
        else:
            if done.sums != tuple(map(checksum, values)):
                raise Violation(f"state {newest} is not what its record says")
            record = yield Request("get", commit_key(newest))
            self._stand(self.world.record(record), values)
        return True

    def _sync(self, *, stands_in):
        """Take part in the next sync; whether this incarnation goes on."""
        state, world = self.state, self.world
        if (
            self.flips
        ):  # a bit of its memory, as in the gather topology, where nobody else would notice
            state.values[0] = (*state.values[0], (self.rank, -1, self.name))
            self.flips = False
        sync = state.sync + 1
        at = Round(
            sync=sync,
            rank=self.rank,
            base=state_digest(state.sums),
            schema=SCHEMA,
            positions=state.positions,
            size=lambda groups, rank: SIZE,
            previous=state.previous,
            members=state.members,
            min_replicas=world.quorum,
            absent=frozenset(self.absent),
            differed=self.differed,
            everybody=world.ranks if world.fixed else (),
        )
        record, own = (yield Request("get", commit_key(sync))), None
        if record is None:
            earlier = (
                at.valid((yield Request("list", deltas(sync)))).get(self.rank)
                if stands_in
                else None
            )
            if earlier is None or earlier.epoch >= self.epoch:
                if not world.fixed or (sync + self.rank) % 4:  # in a fixed run, also with nothing
                    self.learned.append(self.next)
                    self.next += 1
                start, stop = self.next - len(self.learned), self.next
                own = Delta(sync, self.rank, self.epoch, start, stop, at.base, SCHEMA)
                if not at.valid({own.key: SIZE}):
                    raise Violation(f"{own} would not count")
                learned = tuple((self.rank, batch, self.name) for batch in self.learned)
                yield Request("put", own.key, learned)
            self.overdue = self.expired = False
            while record is None:
                listing = yield Request("list", deltas(sync))
                folder = membership.read_folder(at, listing)
                overdue = self.overdue and not world.fixed
                decision = membership.on_look(at, folder, overdue=overdue, expired=self.expired)
                if isinstance(decision, Expired | Leave):
                    return False
                if isinstance(decision, Differ):
                    self.differed = True
                    raise Gone
                if isinstance(decision, Create):
                    yield from self._decide(at, decision.members)
                record = yield Request("get", commit_key(sync))
        commit = world.record(record)
        obeys = membership.on_record(at, commit, follows=state.follows(commit))
        if isinstance(obeys, Differ):
            if world.fixed:
                yield from self._differ()
            self.differed = True
            raise Gone
        if obeys != Obey():
            raise Violation(f"incarnation {self.name} at sync {state.sync} cannot obey {commit}")
        becomes = membership.fate(commit, self.rank, own, learned=own is not None, late=world.late)
        yield from self._adopt(commit, local=becomes == "counted")
        self.is_new = self.is_new and becomes != "counted"
        if becomes != "carried":
            self.learned = []
            self.next = max(self.next, self.state.positions.get(self.rank, 0))
        if self._shares(commit).designated:
            yield from self._collect()
        return True

    def _record(self, at, members):
        positions = {**self.state.positions, **{member.rank: member.stop for member in members}}
        return Commit(at.sync, 0, at.base, at.previous, members, positions, at.sync, run=RUN)

    def _decide(self, at, members):
        yield Request("create", commit_key(at.sync), self._record(at, members).to_json())

    def _shares(self, commit):
        ranks = tuple(member.rank for member in commit.members)
        fixed = self.world.fixed
        return Shares(sync=commit.sync, members=ranks, rank=self.rank, grace=GRACE, fixed=fixed)

    def _adopt(self, commit, *, local=False):
        at, world, values = self._shares(commit), self.world, list(self.state.values)
        if world.fixed and commit.members[self.rank].epoch > self.epoch:
            raise Replaced
        everything = range(world.shards)
        own = at.own(everything)
        for shard in own:
            values[shard] = yield from self._compute(commit, shard, local)
        left, self.elapsed = [shard for shard in everything if shard not in own], 0.0
        self.absent = set()
        while left:
            elapsed = self.elapsed
            self.absent |= at.late_owners(left, elapsed)
            listing = yield Request("list", f"state/{commit.sync:08}/")
            found = [s for s in left if shard_key(commit.sync, 0, s, NONCE) in listing]
            came = []
            for shard in found:
                value = yield Request("get", shard_key(commit.sync, 0, shard, NONCE))
                if value is not None:
                    values[shard] = value
                    came.append(shard)
            left = [shard for shard in left if shard not in came]
            for shard in at.late(left, elapsed):
                values[shard] = yield from self._compute(commit, shard, local)
                came.append(shard)
            left = [shard for shard in left if shard not in came]
            if left and not came and world.fixed:
                yield from self._check_claim()
            elif left and not came:
                self.expired = self.expired or elapsed > 100 * GRACE
                if elapsed > 100 * GRACE:
                    raise Violation(f"the shards {left} of sync {commit.sync} did not come in time")
        self._stand(commit, values)
        if at.designated:
            yield from self._say_done(commit, values)

    def _say_done(self, commit, values):
        sums = tuple(map(checksum, values))
        yield Request("create", done_key(commit.sync, 0), Done(commit.sync, 0, sums, sums, commit))

    def _compute(self, commit, shard, local):
        """A shard after a sync, as it is in the store afterwards.

        ``local``: whether this incarnation's own contribution is in it.
        """
        value = self.state.values[shard]
        key = shard_key(commit.sync, 0, shard, NONCE)
        for member in commit.members:
            batches = yield Request("get", member.key)
            if batches is None:
                return (yield from self._look_again(commit, key))
            unsent = self.world.fixed and member is commit.members[shard]
            if not unsent or (local and member.rank == self.rank):
                value = (*value, *batches)
        if (yield Request("create", key, value)):
            return value
        found = yield Request("get", key)
        return found if found is not None else (yield from self._look_again(commit, key))

    def _look_again(self, commit, key):
        found = yield Request("get", key)
        if found is None:
            newest = rules.newest_done((yield Request("list", "state/")), 1)[0]
            if _shares.inputs_are_superseded(newest, commit.sync, mending=False):
                raise Gone
            raise Violation(
                f"what sync {commit.sync} is computed from is gone, and nothing newer is complete"
            )
        return found

    def _stand(self, commit, values):
        members = {member.rank: member.epoch for member in commit.members}
        self.state = State(commit.sync, values, commit, digest(commit.to_json()), members)
        self.world.check_state(self)

    def _collect(self):
        states = yield Request("list", "state/")
        keys = [*(yield Request("list", "deltas/")), *states, *(yield Request("list", "initial/"))]
        last = self.state.sync
        kept = rules.kept_from(states, 1, last=last)
        gone = rules.collectable(
            keys,
            last=last,
            kept=kept,
            retention=self.world.retention,
            keep_deltas=False,
            initial=NONCE,
        )
        if gone:
            yield Request("delete", tuple(gone))
