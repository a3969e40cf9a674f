"""What must hold after any simulated run, and a training function whose results can be computed from the log alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from .._codecs._named import find_codec
from .._elastic._records._keys import MANIFEST, Delta, commit_key, commit_sync, shard_key
from .._elastic._records._manifest import Manifest
from .._elastic._records._records import Commit, Rollback, digest, read_record
from .._elastic._records._rules import done_states, made_of
from .._errors import FencedError
from .._loop._diloco import DiLoCo
from .._seconds import Seconds
from ._feedback import Feedback
from ._mixing import Mixing
from ._recomputed import Recomputed, recompute
from ._timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .._exchange._report import SyncReport
    from .._outer._fragment import Fragment
    from ._simulation import Node, Outcome
    from ._store import SimulatedStore

_OUTER_LR, _OUTER_MOMENTUM = 0.7, 0.9
_TOLERANCE = 1e-4
_ROUNDING = 1e-12
# Sums of these gradients are exact in these.
_EXACT_CODECS = ("plain", "fp32", "bf16", "fp16")
# Where another codec rounds values that lie between two of its steps, a difference of one bit decides for one or the other.
_TOLERANCE_OF_CODECS = 0.06


@dataclass(slots=True)
class Ledger:
    """A data loader that only counts: which batch comes next."""

    position: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Its position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.position = state["position"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A life has asked for another outer learning rate.

    Attributes:
        rank: Its rank.
        epoch: Its epoch.
        step: The inner step before which it asked.
        value: What it asked for.
        number: How often the rate had been changed then, as far as it knew.
    """

    rank: int
    epoch: int
    step: int
    value: float
    number: int


@dataclass(slots=True)
class SimulatedTraining:
    """Training of a tiny model with made-up gradients, for :func:`simulate`; remembers what every replica came to.

    Args:
        syncs: After how many outer steps it ends.
        sizes: Elements of the model's tensors; each is a fragment.
        sync_every: Inner steps between two syncs of a fragment, or seconds.
        seconds: Virtual seconds that an inner step takes.
        paces: How many times as long it takes, by rank; once if left out.
        pauses: More seconds for a rank's first life at an inner step.
        save_every: Every how many syncs a replica saves its inner state.
        codec: How contributions are sent.
        delay: Inner steps from sending a fragment to adopting the result.
        alpha: How much of its own values a replica keeps when it adopts a sync.
        error_feedback: Whether what the codec loses is added to the next contribution, or how much of it.
        lr: The outer learning rate as a function of rank, life and sync; None if it is the same everywhere.
        wishes: Which outer learning rate a life asks for before an inner step, by (rank, life, step).
        weight: By what contributions are weighed; None for what suits ``sync_every``.
        trim: How many values are left out of the mean at either end of every element.
        clip: Whether contributions are clipped to the median of their norms.
        state_codec: How the owners of shards publish results.
        full_state_every: With a ``state_codec``: every so many syncs of a fragment its values are published whole.

    Attributes:
        states: For every sync, by its number in the log, what replicas held after it: (rank, life, global copies).
        entered: The same for lives that have just entered: ``on_sync`` is not called for what they adopt until then.
        steps: For every sync, which numbers of outer steps replicas counted after it.
        reports: All reports, by (rank, life).
        salts: Which life of a rank an epoch was.
        agreed: Whether a life had agreed to go back to older states, by rank and epoch.
        batches: Which batch was learned in an inner step, by (rank, life, step).
        held: What a replica's fragment held when it could be sent, by (rank, life, fragment, step, newest sync adopted then).
        asked: The wishes that were made.
        mixed: What was wrong with models after syncs, by (rank, life).
        timelines: When each life took its steps and adopted syncs, by (rank, life).
        feedback: The residuals of replicas.
        fragments: The fragments of the life that was made last.
        longest: The longest that a replica spent in one inner step, its syncs included but not its own faults, in virtual
            seconds.
    """

    syncs: int = 6
    sizes: tuple[int, ...] = (40, 30)
    sync_every: int | Seconds = 2
    seconds: float = 1.0
    pauses: dict[tuple[int, int], float] = field(default_factory=dict)
    states: dict[int, list[tuple[int, int, list[torch.Tensor]]]] = field(default_factory=dict)
    entered: dict[int, list[tuple[int, int, list[torch.Tensor]]]] = field(default_factory=dict)
    steps: dict[int, set[int]] = field(default_factory=dict)
    reports: dict[tuple[int, int], list[SyncReport]] = field(default_factory=dict)
    salts: dict[tuple[int, int], int] = field(default_factory=dict)
    save_every: int = 10
    agreed: dict[tuple[int, int], bool] = field(default_factory=dict)
    batches: dict[tuple[int, int, int], int] = field(default_factory=dict)
    longest: float = 0.0
    codec: str = "plain"
    delay: int = 0
    alpha: float = 0.0
    error_feedback: bool | float = False
    feedback: Feedback = field(default_factory=Feedback)
    lr: Callable[[int, int, int], float] | None = None
    wishes: dict[tuple[int, int, int], float] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    weight: Literal["equal", "steps", "tokens"] | None = None
    trim: int = 0
    clip: bool = False
    held: dict[tuple[int, int, int, int, int], torch.Tensor] = field(default_factory=dict)
    mixed: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    paces: Sequence[float] = ()
    timelines: dict[tuple[int, int], Timeline] = field(default_factory=dict)
    state_codec: str = "plain"
    full_state_every: int | None = None
    fragments: Sequence[Fragment] = ()

    def __call__(self, node: Node) -> int:
        """Train; returns the number of syncs."""
        with self.feedback.listening(node.rank, node.life):
            return self._train(node)

    def _train(self, node: Node) -> int:
        model = torch.nn.ParameterList([torch.zeros(size) for size in self.sizes])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        reports = self.reports.setdefault((node.rank, node.life), [])
        ledger = Ledger()
        changes = 0  # how often the outer learning rate had been changed
        mixing = Mixing(list(model), self.alpha)
        timeline = Timeline(node.connection.saw, self.delay)
        self.timelines[node.rank, node.life] = timeline
        self.mixed[node.rank, node.life] = mixing.wrong

        def seen(report: SyncReport) -> None:
            nonlocal changes
            changes = node.exchange.position.rate.number
            reports.append(report)
            ledger.position += report.batches_to_skip
            mixing.synced(report, copies_now(), node.exchange.position.sync)
            if report.committed and report.contribution == "counted" and not report.reloaded:
                fragment = fragments[int(report.fragment)]
                self.feedback.counted(node.rank, node.life, fragment, node.exchange.position.sync)
            note_own(outer.inner_steps)
            timeline.adopted(report, node.exchange.position, outer.inner_steps)
            if report.committed:
                note_state(self.states)

        def note_own(step: int) -> None:
            for fragment, values in enumerate(mixing.own):
                self.held[node.rank, node.life, fragment, step, mixing.adopted] = values
            self.feedback.note(node.rank, node.life, fragments, step, mixing.adopted)

        def copies_now() -> list[torch.Tensor]:
            return [
                copy.clone() for part in outer.state_dict()["fragments"] for copy in part["copy"]
            ]

        def note_state(held: dict[int, list[tuple[int, int, list[torch.Tensor]]]]) -> None:
            copies = copies_now()
            number = node.exchange.position.sync
            self.steps.setdefault(number, set()).add(outer.committed)
            states = held.setdefault(number, [])
            if states and all(torch.equal(a, b) for a, b in zip(copies, states[0][2], strict=True)):
                copies = states[0][2]  # long runs would fill the memory
            states.append((node.rank, node.life, copies))

        outer = DiLoCo(
            model,
            inner,
            node.exchange,
            sync_every=self.sync_every,
            fragments=len(self.sizes),
            outer_lr=_OUTER_LR if self.lr is None else partial(self.lr, node.rank, node.life),
            outer_momentum=_OUTER_MOMENTUM,
            on_sync=seen,
            stateful={"ledger": ledger},
            save_inner_every=self.save_every,
            codec=self.codec,
            delay=self.delay,
            alpha=self.alpha,
            error_feedback=self.error_feedback,
            weight=self.weight,
            aggregate="trimmed" if self.trim else "mean",
            trim=self.trim or None,
            clip="median" if self.clip else None,
            state_codec=self.state_codec,
            full_state_every=self.full_state_every,
        )
        fragments = self.fragments = outer._fragments  # noqa: SLF001 - nobody else needs to see residuals
        with outer:
            self.salts.setdefault((node.rank, node.exchange.epoch), node.life)
            self.agreed[node.rank, node.exchange.epoch] = (
                node.exchange.settings.resume == "newest-whole"
            )
            ledger.position += outer.batches_to_skip
            note_state(self.entered)
            changes = node.exchange.position.rate.number
            mixing.begin(copies_now(), node.exchange.position.sync)
            timeline.enters(node.exchange.position, outer.inner_steps, node.exchange.epoch)
            while outer.committed < self.syncs:
                start = self._spent(node)
                step = outer.inner_steps
                pause = (
                    self.pauses.get((node.rank, outer.inner_steps), 0.0) if node.life == 1 else 0.0
                )
                pace = self.paces[node.rank] if self.paces else 1.0
                node.sleep(self.seconds * pace * (0.9 + 0.2 * node.chance.random()) + pause)
                for tensor in model:
                    tensor.grad = self.gradient(
                        node.rank, node.life, outer.inner_steps, tensor.numel()
                    )
                wish = self.wishes.get((node.rank, node.life, step))
                if wish is not None:
                    outer.set_outer_lr(wish)
                    self.asked.append(Asked(node.rank, node.exchange.epoch, step, wish, changes))
                self.batches[node.rank, node.life, step] = ledger.position
                mixing.step()
                note_own(step + 1)
                ledger.position += 1
                if self.weight == "tokens":
                    outer.count_tokens(self.tokens(node.rank, node.life, step))
                timeline.boundaries[step + 1] = node.connection.clock()
                inner.step()
                self.longest = max(self.longest, self._spent(node) - start)
            timeline.leaves(outer.inner_steps)
        return outer.committed

    @staticmethod
    def _spent(node: Node) -> float:
        """Time of the simulation, without what faults have cost this replica."""
        connection = node.connection
        return connection.clock() - connection.offset - connection.injected

    @staticmethod
    def gradient(rank: int, life: int, step: int, size: int) -> torch.Tensor:
        """The gradient of an inner step; a multiple of 1/16, so that sums are exact."""
        return ((torch.arange(size) * 7 + rank * 13 + life * 5 + step * 29) % 17 - 8).float() / 16

    def expected(self, log: Sequence[Commit | Rollback]) -> dict[int, list[torch.Tensor]]:
        """What every replica must hold after every sync, computed from the log."""
        zeros = [torch.zeros(size, dtype=torch.float64) for size in self.sizes]
        # Values and momentum; and what was lost of the last change, where changes are published encoded.
        states = {(0, index): (zero, zero, zero) for index, zero in enumerate(zeros)}
        now = [(zero, zero, zero) for zero in zeros]
        values_by_sync = {}
        for record in log:
            if isinstance(record, Rollback):
                now = [states[sync, index] for index, sync in enumerate(record.states)]
            else:
                index = record.fragment
                values, momentum, lost = now[index]
                sent = []
                for member in record.members:
                    life = self.salts.get((member.rank, member.epoch), 0)
                    delta = self._learned(values, record, member, life)
                    sent.append(self._as_sent(delta, record, member, life).double())
                mean = self._mean(sent, record.members)
                momentum = _OUTER_MOMENTUM * momentum + mean
                (lr,) = record.rate.values
                change = lost - lr * (mean + _OUTER_MOMENTUM * momentum)
                published = self._as_published(change)
                lost = self._as_published(change - published)
                now[index] = values + published, self._as_published(momentum), lost
                states[record.sync, index] = now[index]
            values_by_sync[record.sync] = [values for values, *_ in now]
        return values_by_sync

    def _as_published(self, values: torch.Tensor) -> torch.Tensor:
        """What all replicas read of something that the owner of a shard publishes."""
        codec = find_codec(self.state_codec)
        if codec.plain:
            return values
        decoded = torch.empty_like(values, dtype=torch.float32)
        codec.decode(codec.encode(values.float()), decoded)
        return decoded.double()

    @staticmethod
    def tokens(rank: int, life: int, step: int) -> int:
        """The tokens of an inner step."""
        return 1 + (rank * 5 + life * 3 + step * 7) % 11

    def _mean(self, sent: Sequence[torch.Tensor], members: Sequence[Delta]) -> torch.Tensor:
        """What the contributions of these members become."""
        values = torch.stack(list(sent))
        if self.clip:
            norms = values.norm(dim=1)
            median = norms.sort().values[(len(norms) - 1) // 2]
            values *= (median / norms).nan_to_num(1.0).clamp(max=1.0).unsqueeze(1)
        if self.trim:
            return values.sort(dim=0).values[self.trim : len(sent) - self.trim].mean(dim=0)
        weights = torch.tensor([self.weight_of(each) for each in members], dtype=torch.float64)
        return (weights / weights.sum()) @ values

    def weight_of(self, member: Delta) -> float:
        """The weight of a contribution, from the steps that it covers."""
        steps = range(member.start, member.stop)
        by_default = "steps" if isinstance(self.sync_every, Seconds) else "equal"
        weight = by_default if self.weight is None else self.weight
        if weight == "equal":
            return 1.0
        if weight == "steps":
            return len(steps)
        life = self.salts.get((member.rank, member.epoch), 0)
        return sum(self.tokens(member.rank, life, step) for step in steps) ** 2 / len(steps)

    def _learned(
        self, values: torch.Tensor, commit: Commit, member: Delta, life: int
    ) -> torch.Tensor:
        """What a member contributed to a sync that started from these values of the fragment."""
        fragment = commit.fragment
        held = self.held.get((member.rank, life, fragment, member.stop, commit.sync - 1))
        if self.alpha and held is not None:
            return (values - held).float()  # and so also what it kept of its own before
        delta = torch.zeros(self.sizes[fragment])
        for step in range(member.start, member.stop):
            delta += self.gradient(member.rank, life, step, self.sizes[fragment])
        return delta

    def _as_sent(
        self, delta: torch.Tensor, commit: Commit, member: Delta, life: int
    ) -> torch.Tensor:
        residual = self.feedback.of(commit, member, life)
        if residual is not None:
            delta = delta + float(self.error_feedback) * residual
            after = self.feedback.after.get((member.rank, life, commit.sync))
            if after is not None:
                return delta - after  # what was not sent is in the residual
        codec, decoded = find_codec(self.codec), torch.empty_like(delta)
        codec.decode(codec.encode(delta), decoded)
        return decoded

    def outer_steps(self, log: Sequence[Commit | Rollback]) -> dict[int, int]:
        """How many outer steps the model has taken after every record of the log."""
        steps = dict.fromkeys(
            ((0, index) for index in range(len(self.sizes))), 0
        )  # by sync and fragment
        now, counts = [0] * len(self.sizes), {}
        for record in log:
            if isinstance(record, Rollback):
                now = [steps[sync, index] for index, sync in enumerate(record.states)]
            else:
                now[record.fragment] += 1
                steps[record.sync, record.fragment] = now[record.fragment]
            counts[record.sync] = sum(now)
        return counts


def violations(
    outcome: Outcome, training: SimulatedTraining, *, deadline: float = 700.0
) -> list[str]:
    """What a simulated run has done wrong; empty where nothing.

    Replicas at the same sync hold the same bytes, which are those that the log says: no contribution counted twice, half
    or not at all, and no batch learned twice by a rank. Their models hold what the rules of delay and mixing say. What a codec
    has lost of a contribution is sent later, never twice, and is not lost without a word. Contributions, and the steps taken
    while they were under way, tile the steps of a life; shares are those of the contributions; and where syncs go by the time,
    each contribution is sent at the first boundary between two steps after it. The log is a chain, with a quorum in
    every record. A life that has not agreed to go back does not go on after a rollback, and one that has a successor saves
    nothing. Encoded state follows from the state before it and the contributions, as published, to the last bit, and is the same
    bytes whenever it is written. No replica waits past the deadline. Every rank gets to the end, and no life ends by an error
    unless a newer one took its place.

    Args:
        outcome: The run.
        training: What it trained.
        deadline: Virtual seconds that a replica may spend in one step.
    """
    problems = [
        f"life {key} raised {error!r}"
        for key, error in outcome.errors().items()
        if not _is_fenced(error)
    ]
    if not outcome.finished:
        problems.append(f"not every rank came to the end (virtual time {outcome.seconds:.0f} s)")
    problems += [
        f"{what} (rank {rank}, life {life})"
        for (rank, life), wrong in training.mixed.items()
        for what in wrong
    ]
    if training.longest > deadline:
        problems.append(f"a replica waited for {training.longest:.0f} s")
    if MANIFEST not in outcome.store.decided:
        return [*problems, "there is no manifest"]
    problems += [f"{key} was written again with other content" for key in outcome.store.changed]
    problems += [
        f"{key} was saved by a life that had a successor" for key in outcome.store.intrusions
    ]
    log, broken = read_log(outcome.store)
    problems += broken
    expected = training.expected(log)
    exact = training.codec in _EXACT_CODECS or training.feedback.explains(log, training.salts)
    exact = exact and training.state_codec in {"plain", "fp32"}
    tolerance = _TOLERANCE if exact else _TOLERANCE_OF_CODECS
    recomputed = Recomputed()
    if not find_codec(training.state_codec).plain and training.fragments:
        recomputed = recompute(outcome.store, log, training.fragments)
        problems += recomputed.wrong
        problems += [f"{key} was made again with other bytes" for key in outcome.store.differing]
    for sync, states in [*sorted(training.states.items()), *sorted(training.entered.items())]:
        for rank, life, copies in states:
            if not all(torch.equal(a, b) for a, b in zip(copies, states[0][2], strict=True)):
                problems.append(
                    f"after sync {sync}, rank {rank} (life {life}) differs from rank {states[0][0]}"
                )
            if not all(map(torch.equal, copies, recomputed.values.get(sync, copies))):
                problems.append(
                    f"after sync {sync}, rank {rank} (life {life}) does not hold what was published"
                )
            if sync in expected:
                far = max(
                    float((a - b).abs().max()) for a, b in zip(copies, expected[sync], strict=True)
                )
                if not far < tolerance:
                    problems.append(
                        f"after sync {sync}, rank {rank} (life {life}) is {far:.3g} off what the log says"
                    )
    steps = training.outer_steps(log)
    problems += [
        f"after sync {sync}, replicas count {sorted(counts)} outer steps, and the model has taken {steps[sync]}"
        for sync, counts in sorted(training.steps.items())
        if sync in steps and counts != {steps[sync]}
    ]
    problems += training.feedback.wrong(log, training.salts)
    problems += learning_rates(log, training) + ignored_wishes(log, training)
    problems += wrong_steps(log, training) + wrong_windows(outcome.store, training)
    return problems + ignored_rollbacks(log, training) + learned_twice(log, training)


def wrong_steps(log: Sequence[Commit | Rollback], training: SimulatedTraining) -> list[str]:
    """Contributions that do not tile the steps of their lives, and reports with other shares or rates than the records."""
    problems = []
    commits = {record.sync: record for record in log if isinstance(record, Commit)}
    for (rank, life), timeline in training.timelines.items():
        who = f"(rank {rank}, life {life})"
        claims = {
            sync: (member.start, member.stop)
            for sync, commit in commits.items()
            for member in commit.members
            if (member.rank, training.salts.get((rank, member.epoch))) == (rank, life)
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
    """Contributions that were not sent at the first boundary after their window, where syncs go by the time."""
    if not isinstance(training.sync_every, Seconds):
        return []
    window = training.sync_every.value / len(training.sizes)
    sent = list(filter(None, (Delta.parse(key) for _, key, size in store.history if size)))
    problems = []
    for (rank, life), timeline in training.timelines.items():
        stops = {
            delta.sync: delta.stop
            for delta in sent
            if (delta.rank, delta.epoch) == (rank, timeline.epoch)
        }
        problems += [
            f"{what} (rank {rank}, life {life})" for what in timeline.not_in_time(stops, window)
        ]
    return problems


def learning_rates(log: Sequence[Commit | Rollback], training: SimulatedTraining) -> list[str]:
    """Records whose outer learning rate is neither that of the record before, nor a wish, nor what a life's function returns."""
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
        (lr,), number = record.rate.values, 0 if last is None else last.rate.number
        if record.rate.number == number > 0:
            right = last is not None and record.rate == last.rate
        elif record.rate.number == number:
            right = training.lr is None and lr == _OUTER_LR
            right = right or lr in {
                training.lr(rank, life, steps[record.sync])
                for (rank, _), life in training.salts.items()
                if training.lr is not None
            }
        else:
            wish = (record.rate.rank, record.rate.epoch, lr)
            right = record.rate.number == number + 1 and wish in wishes
        if not right:
            problems.append(f"record {record.sync} has the outer learning rate {record.rate}")
    return problems


def ignored_wishes(log: Sequence[Commit | Rollback], training: SimulatedTraining) -> list[str]:
    """Wishes that were made before a contribution, and that neither the record that counts it nor an earlier one has heard."""
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
    """Lives that went on after a rollback that they had not agreed to."""
    fence: dict[int, int] = {}
    problems = []
    for record in log:
        if isinstance(record, Rollback):
            fence.update(record.fence)
            continue
        problems += [
            f"rank {member.rank} (epoch {member.epoch}) has not agreed to go back, and takes part in sync {record.sync}"
            for member in record.members
            if member.epoch <= fence.get(member.rank, 0)
            and not training.agreed.get((member.rank, member.epoch), True)
        ]
    return problems


def learned_twice(log: Sequence[Commit | Rollback], training: SimulatedTraining) -> list[str]:
    """Batches that more than one counted step of a rank has learned; what was given up does not count."""
    given_up = {sync for record in log if isinstance(record, Rollback) for sync in record.given_up}
    seen: dict[tuple[int, int, int], int] = {}
    problems = []
    for commit in log:
        if isinstance(commit, Rollback) or commit.sync in given_up:
            continue
        for member in commit.members:
            life = training.salts.get((member.rank, member.epoch), 0)
            for step in range(member.start, member.stop):
                batch = training.batches.get((member.rank, life, step))
                if batch is None:
                    continue  # of a simulation before this one
                key = commit.fragment, member.rank, batch
                if key in seen:
                    problems.append(
                        f"rank {member.rank} learned batch {batch} in syncs {seen[key]} and {commit.sync}"
                    )
                seen[key] = commit.sync
    return problems


def read_log(store: SimulatedStore) -> tuple[list[Commit | Rollback], list[str]]:
    """All records of the log as they were decided, and what is wrong with them."""
    manifest = Manifest.from_json(store.decided[MANIFEST], MANIFEST)
    previous, problems, log = digest(store.decided[MANIFEST]), [], list[Commit | Rollback]()
    positions: dict[tuple[int, int], Mapping[int, int]] = {}  # by fragment and sync
    newest = [0] * len(manifest.fragments)
    decided = [
        (sync, data)
        for key, data in store.decided.items()
        if (sync := commit_sync(key)) is not None
    ]
    records = [read_record(data, sync, commit_key(sync)) for sync, data in decided]
    rollbacks = [record for record in records if isinstance(record, Rollback)]
    # In place of a record that was lost there is a rollback, and a newer one has given up its number.
    lost = {record.sync for record in rollbacks} & {
        sync for record in rollbacks for sync in record.given_up
    }
    while (data := store.decided.get(commit_key(len(log) + 1))) is not None:
        record = read_record(data, len(log) + 1, commit_key(len(log) + 1))
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
        previous = digest(data)
    return log, problems


def broken_promises(store: SimulatedStore, removed: Iterable[str] = ()) -> list[str]:
    """What is missing in a store: to go on with its run, or for a life that lags no more than it may.

    The two newest complete states of every fragment must be there (the initial one is one) with all that they are made of, and
    everything that was committed after the older of them. Published states of the last ``retention`` syncs must stay, in the
    gather topology contributions too.

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
    rollbacks = [record for record in log if isinstance(record, Rollback)]
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


def _is_fenced(error: BaseException) -> bool:
    return isinstance(error, FencedError)
