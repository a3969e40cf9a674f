"""A model of a run of either policy, to try every order of events: incarnations walk the real
decision functions, one request at a time.

Who is in a sync, who computes what, which state is complete and what may go is decided by the
functions of the package; only reading and writing is played here. A state is not a tensor but the
batches that it has counted, so that one which is counted twice shows. What must hold is checked
whenever something is written, deleted or adopted. Only simulated runs have ends of fixed runs: to
give a rank up is no decision of the round.
"""

from __future__ import annotations

import random

from round_incarnation import NONCE, REMEMBERED, RUN, SIZE, Incarnation, Violation, checksum

from diloco_core._run._records import _rules as rules
from diloco_core._run._records._keys import claim_key, commit_sync, shard_key
from diloco_core._run._records._records import Commit, digest, state_digest


class World:
    """The store, the incarnations, and what must hold.

    Args:
        ranks: How many ranks there are.
        quorum: How many must contribute.
        late: What becomes of contributions that come too late.
        retention: How many syncs an incarnation may lag.
        fixed: Whether all ranks are in every sync, and no rank sends its part of the shard that it
            updates.
    """

    def __init__(self, ranks, quorum, *, late="carry", retention=1, fixed=False):
        self.ranks, self.quorum, self.late, self.retention = range(ranks), quorum, late, retention
        self.fixed = fixed
        if fixed:
            self.quorum, self.late, self.retention = ranks, "drop", 2
        self.counted = {}
        self.shards = ranks
        self.objects, self.sizes, self.past = {}, {}, [{}]
        self.incarnations, self.log, self.writes = [], {}, []
        self.states = {0: [()] * ranks}
        for shard in range(ranks):
            self._write(shard_key(0, 0, shard, NONCE), ())

    def start(self, rank):
        """A new incarnation of a rank begins, whatever becomes of the ones before it."""
        self.incarnations.append(Incarnation(self, rank, f"{rank}/{len(self.incarnations)}"))
        return self.incarnations[-1]

    def step(self, incarnation, *, behind=0, torn=False):
        """Carry out the request of an incarnation, and let it go on to its next one.

        Args:
            incarnation: Which.
            behind: By how many writes a listing is old.
            torn: A put is cut off in the middle, and the incarnation ends.
        """
        if incarnation.request is None:
            return
        if torn and incarnation.request.kind == "put":
            self._write(incarnation.request.key, (), size=SIZE // 2)
            incarnation.request = None
            return
        incarnation.go_on(self._answer(incarnation.request, behind))

    def deliver_again(self, number):
        """The network delivers a write once more."""
        if self.writes:
            self._answer(self.writes[number % len(self.writes)], 0)

    def flip(self, incarnation):
        """A bit flips in the memory of an incarnation before its next sync; where one contribution
        is enough, nobody could tell.
        """
        incarnation.flips = self.quorum > 1 and not self.fixed

    def record(self, data):
        """A record of the log as it was read."""
        return Commit.from_json(data, int(data.partition(b'"sync": ')[2].partition(b",")[0]), "")

    def last(self):
        """Number of the last sync that is decided."""
        return max(self.log, default=0)

    def check_state(self, incarnation):
        """An incarnation has adopted a sync: it holds what the log says."""
        # In a fixed run a shard that was deleted may come back with other bytes; then the
        # incarnation has been replaced.
        if self.fixed and self.is_replaced(incarnation.rank, incarnation.epoch):
            return
        if incarnation.state.values != self.states[incarnation.state.sync]:
            raise Violation(
                f"incarnation {incarnation.name} holds {incarnation.state.values} after sync "
                f"{incarnation.state.sync}"
            )

    def is_replaced(self, rank, epoch):
        """Return whether a newer incarnation of a rank has claimed it."""
        return claim_key(rank, epoch + 1) in self.objects

    def _answer(self, request, behind):
        if request.kind == "list":
            seen = self.past[max(0, len(self.past) - 1 - behind)] if behind else self.sizes
            return {key: size for key, size in seen.items() if key.startswith(request.key)}
        if request.kind == "get":
            return self.objects.get(request.key)
        if request.kind == "delete":
            return self._delete(request.key)
        if request.kind == "create" and request.key in self.objects:
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
        del self.past[:-REMEMBERED]

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
        self.counted[sync] = {member.rank: self.objects[member.key] for member in commit.members}
        counted = [batch for batches in self.counted[sync].values() for batch in batches]
        states = [(*value, *counted) for value in self.states[sync - 1]]
        # What a shard of a fixed run becomes is only known when it is published.
        self.states[sync] = [None] * self.shards if self.fixed else states
        if any(len({batch[:2] for batch in value}) < len(value) for value in states):
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
        else:
            shard = int(name[4:9])
            if self.fixed and self._may_be(sync, shard, data) and self.states[sync][shard] is None:
                self.states[sync][shard] = data
            if not (
                self._may_be(sync, shard, data) if self.fixed else data == self.states[sync][shard]
            ):
                raise Violation(f"{key} is not what the log says")

    def _may_be(self, sync, shard, data):
        """Whether its owner may publish this in a fixed run: without its own part only if that is
        lost with an earlier incarnation.
        """
        own, before = self.log[sync].members[shard], self.states[sync - 1][shard]
        counted = self.counted[sync]
        full, rest = (
            (*before, *(batch for rank in ranks for batch in counted[rank]))
            for ranks in (sorted(counted), sorted(counted.keys() - {own.rank}))
        )
        return data == full or (data == rest and self.is_replaced(own.rank, own.epoch))


def walk(world, seed, steps):
    """Take one of the orders in which things may happen; mistakes raise :class:`Violation`."""
    chance = random.Random(seed)
    for rank in world.ranks:
        world.start(rank)
    for _ in range(steps):
        living = [
            incarnation for incarnation in world.incarnations if incarnation.request is not None
        ]
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
            incarnation = chance.choice(living)
            hurry(
                incarnation,
                overdue=chance.random() < 0.2,
                elapsed=chance.choice([0.0, 0.0, 10.0, 30.0]),
            )
            for _ in range(chance.choice([1, 1, 3, 8, 20])):
                world.step(incarnation, behind=chance.choice([0, 0, 0, 2, 6]))
    settle(world)


def hurry(incarnation, *, overdue=False, elapsed=0.0):
    """Time passes for an incarnation."""
    incarnation.overdue = incarnation.overdue or overdue
    incarnation.elapsed = max(incarnation.elapsed, elapsed)


def settle(world, rounds=400):
    """From any situation a run gets on: new incarnations of as many ranks as are needed complete
    two more syncs.
    """
    for incarnation in world.incarnations:
        incarnation.request = None
    goal = world.last() + 2
    ranks = [(world.last() + number) % len(world.ranks) for number in range(world.quorum)]
    incarnations = [world.start(rank) for rank in ranks]
    for number in range(rounds):
        for incarnation in incarnations:
            hurry(incarnation, overdue=number > 20, elapsed=float(number))
            world.step(incarnation)
        if all(incarnation.state.sync >= goal for incarnation in incarnations):
            return
    raise Violation(
        "the run does not get on: "
        f"{[(each.name, each.state.sync, each.request) for each in incarnations]}"
    )
