"""A training function for simulated runs, whose results can be computed from the log alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from diloco_core import DiLoCo, Seconds
from diloco_core._exchange._pending import Pending
from diloco_core._exchange._report import SyncReport
from diloco_core._run._records._keys import Delta
from diloco_core._run._records._records import Commit, Rollback

from ._recomputed import decoded, held, is_near, is_plain, is_sparse, sent_of
from ._simulation import Node
from ._timeline import PERIOD, Feedback, Mixing, Timeline

_OUTER_LR = 0.7
_OUTER_MOMENTUM = 0.9
# Of the second outer parameter group: its momentum, and its learning rate as a multiple of the
# first group's.
_OTHER_MOMENTUM = 0.5
_OTHER_RATE = 0.5


@dataclass(slots=True)
class Ledger:
    """A data loader that only counts: which batch comes next, and which incarnation of the rank has
    taken each inner step.
    """

    position: int = 0
    incarnations: dict[int, int] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Its position, and the incarnations."""
        return {
            "position": self.position,
            "incarnations": [[*each] for each in self.incarnations.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.position = state["position"]
        self.incarnations = dict(state["incarnations"])


@dataclass(frozen=True, slots=True)
class Asked:
    """An incarnation has asked for another outer learning rate.

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
    """Training of a tiny model with made-up gradients, for :func:`simulate`; remembers what every
    replica came to.

    Args:
        syncs: After how many outer steps it ends.
        sizes: Elements of the model's tensors; each is a fragment.
        sync_every: Inner steps between two syncs of a fragment, or seconds.
        seconds: Virtual seconds that an inner step takes.
        paces: How many times as long it takes, by rank; once if left out.
        pauses: More seconds for a rank's first incarnation at an inner step.
        save_every: Every how many syncs a replica saves its inner state.
        codec: How contributions are sent.
        delay: Inner steps from sending a fragment to adopting the result.
        alpha: How much of its own values a replica keeps when it adopts a sync.
        error_feedback: Whether what the codec loses is added to the next contribution, or how much
            of it.
        lr: The outer learning rate as a function of rank, incarnation and sync; None if it is the
            same everywhere.
        wishes: Which outer learning rate an incarnation asks for before an inner step, by (rank,
            incarnation, step).
        weight: By what contributions are weighed; None for what suits ``sync_every``.
        trim: How many values are left out of the mean at either end of every element.
        clip: Whether contributions are clipped to the median of their norms.
        state_codec: How the owners of shards publish results.
        full_state_every: With a ``state_codec``: every so many syncs of a fragment its values are
            published whole.
        groups: Whether every second fragment is in an outer parameter group of its own, with other
            settings.

    Attributes:
        states: For every sync, by its number in the log, what replicas held after it: (rank,
            incarnation, global copies).
        entered: The same for incarnations that have just entered: ``on_sync`` is not called for
            what they adopt until then.
        steps: For every sync, which numbers of outer steps replicas counted after it.
        reports: All reports, by (rank, incarnation).
        salts: Which incarnation of a rank an epoch was.
        agreed: Whether an incarnation had agreed to go back to older states, by rank and epoch.
        batches: Which batch was learned in an inner step, by (rank, incarnation, step).
        held: What a replica's fragment held when it could be sent, by (rank, incarnation, fragment,
            step, newest sync adopted then).
        asked: The wishes that were made.
        mixed: What was wrong with models after syncs, by (rank, incarnation).
        timelines: When each incarnation took its steps and adopted syncs, by (rank, incarnation).
        took: For each (rank, incarnation), which incarnation of the rank has taken each inner step:
            an incarnation of a fixed run goes on with steps of the incarnation before it that no
            sync has counted yet.
        feedback: The residuals of replicas.
        fragments: The fragments of the incarnation that was made last.
        own: What incarnations of fixed runs held of their contributions, where state is published
            encoded; see :data:`Own`.
        longest: The longest that a replica spent in one inner step, its syncs included but not its
            own faults, in virtual seconds.
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
    took: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    state_codec: str = "plain"
    full_state_every: int | None = None
    groups: bool = False
    fragments: Sequence[Any] = ()
    own: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    def __call__(self, node: Node) -> int:
        """Train; returns the number of syncs."""
        with self.feedback.listening(node.rank, node.incarnation):
            return self._train(node)

    def _train(self, node: Node) -> int:
        model = torch.nn.ParameterList([torch.zeros(size) for size in self.sizes])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        begin = node.exchange.begin

        def begin_noted(job: Any, *, last: bool = False) -> Pending:
            sync = node.exchange.position.sync + 1
            self.own[node.rank, node.exchange.epoch, sync] = held(job)
            return begin(job, last=last)

        if node.exchange.fixed and not is_plain(self.state_codec):
            node.exchange.begin = begin_noted  # type: ignore[method-assign]
        reports = self.reports.setdefault((node.rank, node.incarnation), [])
        ledger = Ledger()
        changes = 0  # how often the outer learning rate had been changed
        mixing = Mixing(list(model), self.alpha)
        timeline = Timeline(node.connection.saw, self.delay)
        self.timelines[node.rank, node.incarnation] = timeline
        self.mixed[node.rank, node.incarnation] = mixing.wrong

        def seen(report: SyncReport) -> None:
            nonlocal changes
            changes = node.exchange.position.rate.number
            reports.append(report)
            ledger.position += report.batches_to_skip
            mixing.synced(report, copies_now(), node.exchange.position.sync)
            if report.committed and report.contribution == "counted" and not report.reloaded:
                fragment = fragments[int(report.fragment)]
                self.feedback.counted(
                    node.rank, node.incarnation, fragment, node.exchange.position.sync
                )
            note_own(outer.inner_steps)
            timeline.adopted(report, node.exchange.position, outer.inner_steps)
            if report.committed:
                note_state(self.states)

        def note_own(step: int) -> None:
            for fragment, values in enumerate(mixing.own):
                self.held[node.rank, node.incarnation, fragment, step, mixing.adopted] = values
            self.feedback.note(node.rank, node.incarnation, fragments, step, mixing.adopted)

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
            states.append((node.rank, node.incarnation, copies))

        outer = DiLoCo(
            model,
            inner,
            node.exchange,
            sync_every=self.sync_every,
            fragments=len(self.sizes),
            outer_lr=_OUTER_LR
            if self.lr is None
            else partial(self.lr, node.rank, node.incarnation),
            outer_momentum=_OUTER_MOMENTUM,
            on_sync=seen,
            stateful={"ledger": ledger} if self.save_every else None,
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
            outer_groups=self._outer_groups(list(model), node) if self.groups else None,
        )
        fragments = self.fragments = outer._fragments
        with outer:
            self.salts.setdefault((node.rank, node.exchange.epoch), node.incarnation)
            self.agreed[node.rank, node.exchange.epoch] = (
                node.exchange.settings.resume == "newest-whole"
            )
            ledger.position += outer.batches_to_skip
            note_state(self.entered)
            changes = node.exchange.position.rate.number
            since_sync = outer._count.since_sync
            mixing.begin(copies_now(), node.exchange.position.sync, open_steps=any(since_sync))
            note_own(outer.inner_steps)  # it may leave before it takes a step
            self.took[node.rank, node.incarnation] = ledger.incarnations
            timeline.enters(
                node.exchange.position, outer.inner_steps, node.exchange.epoch, since_sync
            )
            while outer.committed < self.syncs:
                start = self._spent(node)
                step = outer.inner_steps
                pause = self.pauses.get((node.rank, step), 0.0) if node.incarnation == 1 else 0.0
                pace = self.paces[node.rank] if self.paces else 1.0
                node.sleep(self.seconds * pace * (0.9 + 0.2 * node.chance.random()) + pause)
                for tensor in model:
                    tensor.grad = self.gradient(node.rank, node.incarnation, step, tensor.numel())
                wish = self.wishes.get((node.rank, node.incarnation, step))
                if wish is not None:
                    outer.set_outer_lr(wish)
                    self.asked.append(Asked(node.rank, node.exchange.epoch, step, wish, changes))
                self.batches[node.rank, node.incarnation, step] = ledger.position
                mixing.step()
                note_own(step + 1)
                ledger.position += 1
                ledger.incarnations[step] = node.incarnation
                if self.weight == "tokens":
                    outer.count_tokens(self.tokens(node.rank, node.incarnation, step))
                timeline.boundaries[step + 1] = node.connection.clock()
                inner.step()
                self.longest = max(self.longest, self._spent(node) - start)
            timeline.leaves(outer.inner_steps)
        return outer.committed

    def rates(self, rank: int, incarnation: int, sync: int) -> tuple[float, ...]:
        """The outer learning rates that an incarnation proposes for a sync, as long as nobody has
        asked for another.
        """
        lr = _OUTER_LR if self.lr is None else self.lr(rank, incarnation, sync)
        return (lr, _OTHER_RATE * lr) if self.groups else (lr,)

    def _outer_groups(self, model: Sequence[torch.Tensor], node: Node) -> list[dict[str, Any]]:
        def other(sync: int) -> float:
            return self.rates(node.rank, node.incarnation, sync)[1]

        return [
            {"params": model[::2]},
            {"params": model[1::2], "lr": other, "momentum": _OTHER_MOMENTUM},
        ]

    @staticmethod
    def _spent(node: Node) -> float:
        """Time of the simulation, without what faults have cost this replica."""
        connection = node.connection
        return connection.clock() - connection.offset - connection.injected

    @staticmethod
    def gradient(rank: int, incarnation: int, step: int, size: int) -> torch.Tensor:
        """The gradient of an inner step; a multiple of 1/16, so that sums are exact."""
        return (
            (torch.arange(size) * 7 + rank * 13 + incarnation * 5 + step * 29) % PERIOD - 8
        ).float() / 16

    def expected(
        self,
        log: Sequence[Commit | Rollback],
        read: Mapping[str, torch.Tensor],
        gone: Mapping[str, torch.Tensor],
    ) -> dict[int, list[torch.Tensor]]:
        """Return what every replica must hold after every sync, computed from the log.

        Args:
            log: The log of the run.
            read: What the replicas read of contributions, by key. It is used with a sparse codec,
                if it is what was learned: rounding decides which of many equal values are sent, and
                whether a value was sent that is almost zero.
            gone: Which elements of contributions were lost with those who made them, by key; they
                count as zero.
        """
        zeros = [torch.zeros(size, dtype=torch.float64) for size in self.sizes]
        # Values and momentum; and what was lost of the last change, where changes are published
        # encoded.
        states = {(0, index): (zero, zero, zero) for index, zero in enumerate(zeros)}
        now = [(zero, zero, zero) for zero in zeros]
        values_by_sync = {}
        for record in log:
            if isinstance(record, Rollback):
                now = [states[sync, index] for index, sync in enumerate(record.states)]
            else:
                index = record.fragment
                values, momentum, lost = now[index]
                sent, norms = [], []
                for member in record.members:
                    incarnation = self.salts.get((member.rank, member.epoch), 0)
                    delta = self._learned(values, record, member, incarnation)
                    values_sent = self._as_sent(
                        delta, record, member, incarnation, read.get(member.key)
                    )
                    # As the contribution says, whatever is lost later.
                    norms.append(values_sent.double().norm())
                    if member.key in gone:
                        values_sent = values_sent.masked_fill(gone[member.key], 0.0)
                    sent.append(values_sent.double())
                mean = self._mean(sent, norms, record.members)
                group = index % 2 if self.groups else 0
                lr, decay = record.rate.values[group], (_OUTER_MOMENTUM, _OTHER_MOMENTUM)[group]
                momentum = decay * momentum + mean
                change = lost - lr * (mean + decay * momentum)
                published = self._as_published(change)
                lost = self._as_published(change - published)
                now[index] = values + published, self._as_published(momentum), lost
                states[record.sync, index] = now[index]
            values_by_sync[record.sync] = [values for values, *_ in now]
        return values_by_sync

    def _as_published(self, values: torch.Tensor) -> torch.Tensor:
        """Return what all replicas read of something that the owner of a shard publishes."""
        if is_plain(self.state_codec):
            return values
        return decoded(self.state_codec, values.float()).double()

    @staticmethod
    def tokens(rank: int, incarnation: int, step: int) -> int:
        """The tokens of an inner step."""
        return 1 + (rank * 5 + incarnation * 3 + step * 7) % 11

    def _mean(
        self,
        sent: Sequence[torch.Tensor],
        of_sent: Sequence[torch.Tensor],
        members: Sequence[Delta],
    ) -> torch.Tensor:
        """What the contributions of these members become, with the norms that they had when they
        were sent.
        """
        values = torch.stack(list(sent))
        if self.clip:
            norms = torch.stack(list(of_sent))
            counted = norms[norms > 0] if self.sparse and bool(norms.any()) else norms
            median = counted.sort().values[(len(counted) - 1) // 2]
            values *= (median / norms).nan_to_num(1.0).clamp(max=1.0).unsqueeze(1)
        if self.trim:
            return values.sort(dim=0).values[self.trim : len(sent) - self.trim].mean(dim=0)
        weights = torch.tensor([self.weight_of(member) for member in members], dtype=torch.float64)
        if self.sparse:
            of_senders = weights @ (values != 0).double()
            return (weights @ values) / of_senders.where(of_senders > 0, 1.0)
        return (weights / weights.sum()) @ values

    @property
    def sparse(self) -> bool:
        """Whether contributions hold few values, so that the mean of an element is that of those
        who sent it.
        """
        return is_sparse(self.codec)

    def weight_of(self, member: Delta) -> float:
        """The weight of a contribution, from the steps that it covers."""
        steps = range(member.start, member.stop)
        by_default = "steps" if isinstance(self.sync_every, Seconds) else "equal"
        weight = by_default if self.weight is None else self.weight
        if weight == "equal":
            return 1.0
        if weight == "steps":
            return len(steps)
        tokens = [self.tokens(member.rank, self._took(member, step), step) for step in steps]
        return sum(tokens) ** 2 / len(steps)

    def _took(self, member: Delta, step: int) -> int:
        """The incarnation of a member's rank that has taken an inner step."""
        incarnation = self.salts.get((member.rank, member.epoch), 0)
        return self.took.get((member.rank, incarnation), {}).get(step, incarnation)

    def _learned(
        self, values: torch.Tensor, commit: Commit, member: Delta, incarnation: int
    ) -> torch.Tensor:
        """What a member contributed to a sync that started from these values of the fragment."""
        fragment = commit.fragment
        held = self.held.get((member.rank, incarnation, fragment, member.stop, commit.sync - 1))
        if self.alpha and held is not None:
            return (values - held).float()  # and so also what it kept of its own before
        delta = torch.zeros(self.sizes[fragment])
        for step in range(member.start, member.stop):
            took = self._took(member, step)
            delta += self.gradient(member.rank, took, step, self.sizes[fragment])
        return delta

    def _as_sent(
        self,
        delta: torch.Tensor,
        commit: Commit,
        member: Delta,
        incarnation: int,
        read: torch.Tensor | None,
    ) -> torch.Tensor:
        residual = self.feedback.of(commit, member, incarnation)
        if residual is not None:
            delta = delta + float(self.error_feedback) * residual
            after = self.feedback.after.get((member.rank, incarnation, commit.sync))
            if after is not None:
                sent = delta - after  # what was not sent is in the residual
                return read if read is not None and is_near(read, sent) else sent
        if read is not None:
            return sent_of(self.codec, delta, read)
        return decoded(self.codec, delta)

    def outer_steps(self, log: Sequence[Commit | Rollback]) -> dict[int, int]:
        """Return how many outer steps the model has taken after every record of the log."""
        # By sync and fragment.
        steps = dict.fromkeys(((0, index) for index in range(len(self.sizes))), 0)
        now, counts = [0] * len(self.sizes), {}
        for record in log:
            if isinstance(record, Rollback):
                now = [steps[sync, index] for index, sync in enumerate(record.states)]
            else:
                now[record.fragment] += 1
                steps[record.sync, record.fragment] = now[record.fragment]
            counts[record.sync] = sum(now)
        return counts


class OtherTraining(SimulatedTraining):
    """Training of the same model with other gradients."""

    @staticmethod
    def gradient(rank: int, incarnation: int, step: int, size: int) -> torch.Tensor:
        """The gradient of the next rank."""
        return SimulatedTraining.gradient(rank + 1, incarnation, step, size)
