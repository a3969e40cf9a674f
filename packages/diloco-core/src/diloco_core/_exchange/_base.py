"""The exchange: the one operation by which replicas arrive at the same values.

The parameters are cut into shards. The owner of a shard sums the contributions of all replicas to
it in rank order, applies the update and publishes the new values; all replicas adopt them. All of
them read the same bytes, so they agree exactly, also on different processors. Contributions,
updates and adoption go chunk by chunk through small buffers, so an exchange does not need memory of
the size of the model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .._arithmetic._sync_job import SyncJob
from .._model._unsynced import Unsynced
from .._terms._support import Support
from .._terms._terms import DEFAULT, Terms
from ._pending import Pending
from ._report import SyncReport


@dataclass(frozen=True, slots=True)
class Schema:
    """The settings and tensors that all replicas must have in common.

    Attributes:
        tensors: By name, a line for each tensor: its shape, dtype and all else that must agree.
        settings: Settings of the outer loop.
        fragments: A description of the files of every fragment, for readers that have no replica.
            It follows from the other fields and is not compared.
        unsynced: The tensors of the model that are not synced; the replica that begins the run
            stores them. Not compared.
        outer_state: Returns how many tensors the outer optimizer keeps per parameter, for plans.
            Not compared.
        terms: What the settings were made from. Not compared itself.
    """

    tensors: Mapping[str, str]
    settings: Mapping[str, str]
    fragments: Sequence[Mapping[str, Any]] = ()
    unsynced: Unsynced | None = field(default=None, compare=False)
    outer_state: Callable[[], float] = field(default=lambda: 1.0, compare=False)
    terms: Terms = field(default=DEFAULT, compare=False)


class Exchange(Protocol):
    """One replica's connection to the others.

    To be used by one thread at a time, apart from :meth:`give_up`.

    Attributes:
        rank: The rank of this replica.
        world_size: The number of ranks.
        process: The number of this process in its replica, from 0.
        processes: How many processes the replica is.
        support: What it can do beyond plain means; what it cannot is refused when the outer loop is
            made.
    """

    rank: int
    world_size: int
    process: int = 0
    processes: int = 1
    support: Support = Support()

    @abstractmethod
    def join(self, schema: Schema) -> None:
        """Meet the other replicas; returns when all have arrived and agree.

        Repeatable with the same schema.

        Raises:
            RendezvousTimeoutError: Some ranks never arrived; the message names them.
            RunExistsError: The prefix was used before.
            MismatchError: The replicas disagree; the message says on what.
        """

    @abstractmethod
    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:
        """Contribute, as far as possible without waiting.

        ``finish()`` of the returned object does the rest of :meth:`sync`.

        Only one sync may be in progress at a time. The arguments and errors are those of
        :meth:`sync`.
        """

    def sync(self, job: SyncJob, *, last: bool = False) -> SyncReport:
        """Contribute, reduce, update, adopt. Returns when this replica has adopted the result.

        It calls :meth:`begin` and then ``finish()``; exchanges that derive from this class inherit
        it. An error in the middle leaves the copies of this replica undefined; the published state
        in the store stays complete.

        Args:
            job: The tensors to sync, and what to do with the result.
            last: Whether this replica can do without the sync. If so, an UnequalSyncsError in a
                fixed run is not a failure of this replica: its copies are unchanged; it may leave.

        Raises:
            NonFiniteDeltaError: The contribution of this replica holds NaN or infinity; nothing was
                sent.
            NonFiniteUpdateError: The new values would be NaN or infinite; they are not published.
            SyncTimeoutError: Other replicas did not contribute in time; the message names them.
            ReplicaLostError: Another replica died or failed.
            UnequalSyncsError: Another replica finished after fewer syncs.
            CorruptedObjectError: An object in the store is damaged.
        """
        return self.begin(job, last=last).finish()

    @abstractmethod
    def shards(self, size: int) -> int:
        """Return the number of shards into which values of ``size`` bytes are cut.

        It is the same on every replica.

        Raises:
            ConfigurationError: The values are too large for one object.
        """

    def give_up(self) -> None:
        """Make a sync that another thread carries out end soon, instead of waiting.

        It ends with a :class:`._pending.GivenUpError`. The exchange still works afterwards, but no
        other sync can be begun. This method and :meth:`hurry` are the only ones that may be called
        while a sync is carried out. An exchange that cannot do this does nothing.
        """
        return  # not abstract: most exchanges do not carry out syncs in another thread

    def hurry(self, hurried: bool) -> None:  # noqa: ARG002 - for exchanges that can
        """Say that this replica leaves, or that it does not after all.

        A sync that another thread carries out need not be decided then: it ends as one that was
        begun with ``last``, at once, and can be begun again. An exchange in which every sync is
        decided does nothing. May be called while a sync is carried out.
        """
        return

    @abstractmethod
    def leave(self) -> None:
        """Tell the others that this replica is done; repeatable."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Tell the others that this replica has failed, so that they need not wait.

        Repeatable; never raises.
        """
