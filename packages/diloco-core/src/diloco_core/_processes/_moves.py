"""What the processes of a replica do together, as the leader says.

While the leader carries out a part of its outer loop, the others follow: each does what the next
move says, until the last one. So no process waits in a collective that another one does not enter.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeAlias

from .._errors import SyncError
from .._exchange._report import SyncReport

What: TypeAlias = Literal["try", "save", "load"]
"""Every process tries out, gives or takes its inner state."""

_APART = 0.1  # of the way: several GPUs may round differently, which leads them apart by much less


@dataclass(frozen=True, slots=True)
class Values:
    """Values go from the leader to all, and from all to the leader.

    Attributes:
        new: Which tensors, by number, have new values.
        wanted: Of which others the leader needs the whole values.
        mail: Whether it needs the mail, as it does at first.
    """

    new: tuple[int, ...]
    wanted: tuple[int, ...]
    mail: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the leader's outer loop stands.

    Attributes:
        committed: Outer steps that the model has taken.
        inner_steps: Inner steps that this replica has taken.
        syncing: Whether a sync is under way.
        batches_to_skip: See :attr:`.DiLoCo.batches_to_skip`.
        next_in: After how many inner steps all processes meet again.
        wait: For how many more they do not, where some of several optimizers have not stepped yet.
    """

    committed: int = 0
    inner_steps: int = 0
    syncing: bool = False
    batches_to_skip: int = 0
    next_in: int = 1
    wait: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """All has been done, once every process has the values that are new.

    Attributes:
        progress: Where the replica stands now.
        reports: Of the syncs that came to their end meanwhile.
        result: What the leader's call has returned.
        mail: Whether the leader has taken what the processes had for it.
        steps: How many inner steps it has taken since all met last.
        new: Which tensors, by number, have new values.
    """

    progress: Progress
    reports: tuple[SyncReport, ...] = ()
    result: Any = None
    mail: bool = False
    steps: int = 0
    new: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The leader has failed, and so all processes do.

    Attributes:
        kind: The class of its error.
        arguments: What the error was made of.
        state: The attributes of the error.
    """

    kind: type[BaseException]
    arguments: tuple[Any, ...]
    state: Mapping[str, Any]

    def error(self) -> BaseException:
        """Return the error again; its class may take other arguments than those it has kept."""
        if issubclass(self.kind, SystemExit):
            return self.kind(*self.arguments)
        error = self.kind.__new__(self.kind, *self.arguments)
        error.args = self.arguments
        error.__dict__.update(self.state)
        return error


Move: TypeAlias = Values | What | Done | Failed


def failed(error: BaseException) -> Failed:
    """Return the move for an error: as a :class:`.SyncError` if it cannot be sent as it is."""
    move = Failed(type(error), error.args, error.__dict__)
    with suppress(Exception):  # whatever the error's class does here
        arrives = pickle.loads(pickle.dumps(move)).error()
        if str(arrives) == str(error):
            return move
    return Failed(SyncError, (f"{type(error).__name__}: {error}",), {})


@dataclass(frozen=True, slots=True)
class Mail:
    """What one process has for the leader when they meet.

    Attributes:
        inner_steps: Inner steps that it has taken in this block.
        tokens: Tokens that it has counted since the last meeting.
        rates: The outer learning rates that it was asked to set, each with its group.
        samples: Some values that are alike in all processes, of each tensor by number.
        call: What the program has called; empty for a step.
    """

    inner_steps: int = 0
    tokens: int = 0
    rates: tuple[tuple[float, int | None], ...] = ()
    samples: Mapping[int, Sequence[float]] = field(default_factory=dict)
    call: str = ""


def check_steps(steps: Mapping[int, int]) -> None:
    """Refuse processes, by number, that have taken different numbers of inner steps.

    Raises:
        SyncError: They have.
    """
    if len(set(steps.values())) > 1:
        told = ", ".join(f"process {number}: {count}" for number, count in steps.items())
        raise SyncError(
            f"the processes of this replica have taken different numbers of inner steps ({told}): "
            "all of them must step their optimizers together"
        )


def check_mails(mails: Sequence[Mail]) -> None:
    """Refuse processes, in their order, that are at different steps or in different calls.

    Raises:
        SyncError: They are.
    """
    check_steps({number: mail.inner_steps for number, mail in enumerate(mails)})
    if len({mail.call for mail in mails} - {""}) > 1:
        calls = ", ".join(f"process {n}: {mail.call}" for n, mail in enumerate(mails) if mail.call)
        raise SyncError(
            f"the processes of this replica do different things ({calls}): all of them must come "
            "to flush(), global_model(), global_state_dict() and the end of the block together"
        )


def check_alike(
    samples: Sequence[Mapping[int, Sequence[float]]], before: Mapping[int, Sequence[float]]
) -> None:
    """Refuse processes that have trained the same parameters apart from each other.

    Args:
        samples: The same values, from each process.
        before: What they were when the processes had last agreed on them.

    Raises:
        SyncError: They have, by more than rounding explains.
    """
    *values, agreed = (list(chain(*each.values())) for each in (*samples, before))
    for number, each in enumerate(values):
        if math.dist(each, values[0]) > _APART * math.dist(values[0], agreed):
            raise SyncError(
                f"process {number} of this replica has trained its model to other values than "
                "process 0, and a sync would take parts of both. Wrap the model in "
                "DistributedDataParallel or fully_shard, or average the gradients before each step"
            )
