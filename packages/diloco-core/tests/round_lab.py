"""A model of an elastic run, to try every order of events: lives that walk the real decision functions, one request at a time.

Who is in a sync, who computes what, which state is complete and what may go is decided by the functions of the package; only
reading and writing is played here. A state is not a tensor but the batches that it has counted, so that one which is counted
twice shows. What must hold is checked whenever something is written, deleted or adopted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from diloco_core._elastic._log import _rules as rules
from diloco_core._elastic._log._keys import (
    Delta,
    Hint,
    claim_key,
    commit_key,
    commit_sync,
    deltas,
    done_key,
    epochs,
    shard_key,
)
from diloco_core._elastic._log._records import Commit, Done, digest, state_digest
from diloco_core._elastic._round import _membership as membership
from diloco_core._elastic._round import _shares as shares
from diloco_core._elastic._round._membership import Create, Differ, Expired, Leave, Obey, Round
from diloco_core._elastic._round._shares import (
    Adopt,
    Complete,
    Compute,
    KeepWaiting,
    Pending,
    Shares,
)

RUN, SCHEMA, NONCE = "b" * 16, "f" * 16, "a" * 16
SIZE, GRACE = 100, 10.0
_REMEMBERED = 12  # how many writes a listing may be behind


class Violation(AssertionError):
    """Something that must never happen."""


class Gone(Exception):
    """What a life would go on from is gone, since newer state is complete: it loads again."""


@dataclass(frozen=True)
class Request:
    """One request to the store; a life stands still until the world has carried it out."""

    kind: str
    key: Any
    data: Any = None


@dataclass
class State:
    """What a life holds: per shard the batches that are counted, and where it stands in the log."""

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


class Life:
    """One life of a rank. ``request`` is what it is about to do; None when it has ended."""

    def __init__(self, world, rank, name):
        self.world, self.rank, self.name = world, rank, name
        self.epoch, self.state, self.absent = 0, State(), set()
        self.overdue, self.expired, self.elapsed = False, False, 0.0
        self.flips = self.differed = False
        self.learned: list = []
        self.next = 0
        self._program = self._live()
        self.request = next(self._program)

    def go_on(self, answer):
        """Hand over the answer to its request."""
        try:
            self.request = self._program.send(answer)
        except StopIteration:
            self.request = None

    def _live(self):
        yield from self._claim()
        yield from self._catch_up()
        first = True
        while True:
            if (yield Request("get", claim_key(self.rank, self.epoch + 1))) is not None:
                return
            sync = self.state.sync + 1
            if (yield Request("get", commit_key(sync))) is None and self.epoch not in {
                self.state.members.get(self.rank)
            }:
                yield Request("put", Hint(sync, self.rank, self.epoch, "join").key, "hint")
            try:
                if not (yield from self._sync(stands_in=first)):
                    yield Request("put", Hint(sync, self.rank, self.epoch, "leave").key, "hint")
                    return
                self.differed = False
            except Gone:
                yield from self._catch_up()
            first = False

    def _claim(self):
        listing = yield Request("list", "claims/")
        epoch = (
            1
            if "no epochs" in self.world.broken
            else max(epochs(listing, self.rank), default=0) + 1
        )
        while True:
            created = yield Request("create", claim_key(self.rank, epoch), self.name)
            if created or "no epochs" in self.world.broken:
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
                if "no replay" in self.world.broken:
                    self._stand(self.world.record(record), self.state.values)
                else:
                    yield from self._adopt(self.world.record(record))
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
        """Take part in the next sync; whether this life goes on."""
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
            size=lambda groups: SIZE,
            previous=state.previous,
            members=state.members,
            min_replicas=world.quorum,
            absent=frozenset(self.absent),
            differed=self.differed,
        )
        record, own, held = (yield Request("get", commit_key(sync))), None, None
        if record is None:
            earlier = (
                at.valid((yield Request("list", deltas(sync)))).get(self.rank)
                if stands_in
                else None
            )
            if earlier is None or earlier.epoch >= self.epoch:
                self.learned.append(self.next)
                self.next += 1
                start, stop = self.learned[0], self.learned[-1] + 1
                own = Delta(sync, self.rank, self.epoch, start, stop, at.base, SCHEMA)
                if not at.valid({own.key: SIZE}):
                    raise Violation(f"{own} would not count")
                held = Request(
                    "put", own.key, tuple((self.rank, batch, self.name) for batch in self.learned)
                )
                if "record before payload" not in world.broken:
                    yield held
            self.overdue = self.expired = False
            while record is None:
                listing = yield Request("list", deltas(sync))
                if "record before payload" in world.broken and own is not None:
                    listing = {**listing, own.key: SIZE}
                folder = membership.read_folder(at, listing)
                decision = membership.on_look(
                    at, folder, overdue=self.overdue, expired=self.expired
                )
                if isinstance(decision, Expired | Leave):
                    return False
                if isinstance(decision, Differ):
                    self.differed = True
                    raise Gone
                if isinstance(decision, Create):
                    yield from self._decide(at, decision.members)
                    if "own listing" in world.broken:
                        record = self._record(at, decision.members).to_json()
                        break
                if "record before payload" in world.broken and own is not None:
                    yield held
                record = yield Request("get", commit_key(sync))
        commit = world.record(record)
        obeys = membership.on_record(at, commit, follows=state.follows(commit))
        if isinstance(obeys, Differ):
            self.differed = True
            raise Gone
        if obeys != Obey():
            raise Violation(f"life {self.name} at sync {state.sync} cannot obey {commit}")
        becomes = membership.fate(commit, self.rank, own, learned=own is not None, late=world.late)
        yield from self._adopt(commit, local=becomes == "counted")
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
        return Shares(sync=commit.sync, members=ranks, rank=self.rank, grace=GRACE)

    def _adopt(self, commit, *, local=False):
        at, world, values = self._shares(commit), self.world, list(self.state.values)
        everything = range(world.shards)
        if "done first" in world.broken and at.designated:
            yield from self._say_done(commit, world.states[commit.sync])
        own = at.own(everything)
        for shard in own:
            values[shard] = yield from self._compute(commit, shard)
        left, self.elapsed = [shard for shard in everything if shard not in own], 0.0
        self.absent = set()
        while left:
            elapsed = self.elapsed
            self.absent |= at.late_owners(left, elapsed)
            listing = yield Request("list", f"state/{commit.sync:08}/")
            found = [s for s in left if shard_key(commit.sync, 0, s, NONCE) in listing]
            seen = Pending(tuple(left), tuple(found))
            while True:
                decision = shares.on_pending(at, seen, elapsed=elapsed, patience=1e9)
                came = []
                if isinstance(decision, Adopt):
                    for shard in decision.shards:
                        value = yield Request("get", shard_key(commit.sync, 0, shard, NONCE))
                        if value is not None:
                            values[shard] = value
                            came.append(shard)
                elif isinstance(decision, Compute):
                    for shard in decision.shards:
                        values[shard] = yield from self._compute(commit, shard)
                        came.append(shard)
                else:
                    break
                left = [shard for shard in left if shard not in came]
                seen = Pending(tuple(left), (), seen.arrived or bool(came))
            if isinstance(decision, KeepWaiting):
                self.expired = self.expired or elapsed > 100 * GRACE
                if elapsed > 100 * GRACE:
                    raise Violation(f"the shards {left} of sync {commit.sync} did not come in time")
            elif isinstance(decision, Complete):
                break
        self._stand(commit, values)
        if at.designated:
            yield from self._say_done(commit, values)

    def _say_done(self, commit, values):
        sums = tuple(map(checksum, values))
        yield Request("create", done_key(commit.sync, 0), Done(commit.sync, 0, sums, sums, commit))

    def _compute(self, commit, shard):
        """A shard after a sync, as it is in the store afterwards."""
        value = self.state.values[shard]
        key = shard_key(commit.sync, 0, shard, NONCE)
        for member in commit.members:
            batches = yield Request("get", member.key)
            if batches is None:
                return (yield from self._look_again(commit, key))
            value = (*value, *batches)
        if (yield Request("create", key, value)):
            return value
        found = yield Request("get", key)
        return found if found is not None else (yield from self._look_again(commit, key))

    def _look_again(self, commit, key):
        found = yield Request("get", key)
        if found is None:
            newest = rules.newest_done((yield Request("list", "state/")), 1)[0]
            if shares.inputs_are_superseded(newest, commit.sync, mending=False):
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


class World:
    """The store, the lives, and what must hold.

    Args:
        ranks: How many ranks there are.
        quorum: How many must contribute.
        late: What becomes of contributions that come too late.
        retention: How many syncs a life may lag.
        broken: What lives do wrong, for tests that see it found out.
    """

    def __init__(self, ranks, quorum, *, late="carry", retention=1, broken=()):
        self.ranks, self.quorum, self.late, self.retention = range(ranks), quorum, late, retention
        self.shards, self.broken = ranks, frozenset(broken)
        self.objects, self.sizes, self.past = {}, {}, [{}]
        self.lives, self.log, self.writes = [], {}, []
        self.states = {0: [()] * ranks}
        for shard in range(ranks):
            self._write(shard_key(0, 0, shard, NONCE), ())

    def start(self, rank):
        """A new life of a rank begins, whatever becomes of the ones before it."""
        self.lives.append(Life(self, rank, f"{rank}/{len(self.lives)}"))
        return self.lives[-1]

    def step(self, life, *, behind=0, torn=False):
        """Carry out the request of a life, and let it go on to its next one.

        Args:
            life: Which.
            behind: By how many writes a listing is old.
            torn: A put is cut off in the middle, and the life ends.
        """
        if life.request is None:
            return
        if torn and life.request.kind == "put":
            self._write(life.request.key, (), size=SIZE // 2)
            life.request = None
            return
        life.go_on(self._answer(life.request, behind))

    def deliver_again(self, number):
        """The network delivers a write once more."""
        if self.writes:
            self._answer(self.writes[number % len(self.writes)], 0)

    def flip(self, life):
        """A bit flips in the memory of a life before its next sync; where one contribution is enough, nobody could tell."""
        life.flips = self.quorum > 1

    def record(self, data):
        """A record of the log as it was read."""
        return Commit.from_json(data, int(data.partition(b'"sync": ')[2].partition(b",")[0]), "")

    def last(self):
        """Number of the last sync that is decided."""
        return max(self.log, default=0)

    def check_state(self, life):
        """A life has adopted a sync: it holds what the log says."""
        if life.state.values != self.states[life.state.sync]:
            raise Violation(
                f"life {life.name} holds {life.state.values} after sync {life.state.sync}"
            )

    def _answer(self, request, behind):
        if request.kind == "list":
            seen = self.past[max(0, len(self.past) - 1 - behind)] if behind else self.sizes
            return {key: size for key, size in seen.items() if key.startswith(request.key)}
        if request.kind == "get":
            return self.objects.get(request.key)
        if request.kind == "delete":
            return self._delete(request.key)
        if (
            request.kind == "create"
            and request.key in self.objects
            and "overwriting" not in self.broken
        ):
            return False
        self.writes.append(request)
        self._write(request.key, request.data)
        return True

    def _write(self, key, data, size=SIZE):
        sync = commit_sync(key)
        if sync is not None:
            self._check_record(sync, self.record(data))
        elif key.startswith("state/"):
            self._check_published(key, data)
        self.objects[key], self.sizes[key] = data, size
        self._remember()

    def _delete(self, keys):
        for key in keys:
            self.objects.pop(key, None)
            self.sizes.pop(key, None)
            if key.startswith("state/") and int(key.split("/")[1]) > self.last() - self.retention:
                raise Violation(f"{key} was removed too early")
        self._remember()
        complete = rules.done_states(self.sizes, 1)[0] | {0}
        two = sorted(complete, reverse=True)[:2]
        needed = [shard_key(sync, 0, shard, NONCE) for sync in two for shard in range(self.shards)]
        for sync in range(two[-1] + 1, self.last() + 1):
            needed += [member.key for member in self.log[sync].members]
        lost = [key for key in needed if key not in self.objects]
        if lost:
            raise Violation(f"{lost} are gone, and needed")

    def _remember(self):
        self.past.append(dict(self.sizes))
        del self.past[:-_REMEMBERED]

    def _check_record(self, sync, commit):
        if sync in self.log:
            if self.log[sync] != commit:
                raise Violation(f"sync {sync} is decided twice")
            return
        before = self.log.get(sync - 1)
        if sync != self.last() + 1 or commit.previous != (
            digest(before.to_json()) if before else RUN
        ):
            raise Violation(f"record {sync} does not follow the one before")
        if commit.base != state_digest(tuple(map(checksum, self.states[sync - 1]))):
            raise Violation(f"record {sync} is of a state that nobody holds")
        if len({member.rank for member in commit.members}) < self.quorum:
            raise Violation(f"record {sync} is below the quorum")
        if any(self.sizes.get(member.key) != SIZE for member in commit.members):
            raise Violation(f"record {sync} names what is not there")
        if any(member.base != commit.base for member in commit.members):
            raise Violation(f"record {sync} names what was made from another state")
        self.log[sync] = commit
        counted = [batch for member in commit.members for batch in self.objects[member.key]]
        self.states[sync] = [(*value, *counted) for value in self.states[sync - 1]]
        if any(len({batch[:2] for batch in value}) < len(value) for value in self.states[sync]):
            raise Violation(f"sync {sync} counts a batch twice: {counted}")

    def _check_published(self, key, data):
        sync, name = int(key.split("/")[1]), key.rpartition("/")[2]
        if sync not in self.log:
            raise Violation(f"{key} is published before its sync is decided")
        if name.endswith(".done.json"):
            files = [shard_key(sync, 0, shard, NONCE) for shard in range(self.shards)]
            newer = max(rules.newest_done(self.sizes, 1)) > sync
            if not newer and any(file not in self.objects for file in files):
                raise Violation(f"state {sync} is called complete, and is not")
        elif data != self.states[sync][int(name[4:9])]:
            raise Violation(f"{key} is not what the log says")


def walk(world, seed, steps):
    """One of the orders in which things may happen; whatever goes wrong raises :class:`Violation`."""
    chance = random.Random(seed)
    for rank in world.ranks:
        world.start(rank)
    for _ in range(steps):
        living = [life for life in world.lives if life.request is not None]
        what = chance.random()
        if what < 0.02 or not living:
            world.start(chance.choice(world.ranks))
        elif what < 0.03:
            chance.choice(living).request = None
        elif what < 0.04:
            world.step(chance.choice(living), torn=True)
        elif what < 0.06:
            world.deliver_again(chance.randrange(1000))
        elif what < 0.08:
            world.flip(chance.choice(living))
        else:
            life = chance.choice(living)
            hurry(
                life, overdue=chance.random() < 0.2, elapsed=chance.choice([0.0, 0.0, 10.0, 30.0])
            )
            for _ in range(chance.choice([1, 1, 3, 8, 20])):
                world.step(life, behind=chance.choice([0, 0, 0, 2, 6]))
    settle(world)


def hurry(life, *, overdue=False, elapsed=0.0):
    """Time passes for a life."""
    life.overdue = life.overdue or overdue
    life.elapsed = max(life.elapsed, elapsed)


def settle(world, rounds=400):
    """From any situation a run gets on: new lives of as many ranks as are needed complete two more syncs."""
    for life in world.lives:
        life.request = None
    goal = world.last() + 2
    ranks = [(world.last() + number) % len(world.ranks) for number in range(world.quorum)]
    lives = [world.start(rank) for rank in ranks]
    for number in range(rounds):
        for life in lives:
            hurry(life, overdue=number > 20, elapsed=float(number))
            world.step(life)
        if all(life.state.sync >= goal for life in lives):
            return
    raise Violation(
        f"the run does not get on: {[(life.name, life.state.sync, life.request) for life in lives]}"
    )
