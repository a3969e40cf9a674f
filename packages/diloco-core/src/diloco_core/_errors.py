"""Every error that diloco-core raises, in one tree.

DilocoError (diloco_protocol)
└── CoreError
    ├── ConfigurationError (ValueError)     an argument is wrong; nothing was started
    ├── NonFiniteDeltaError (ArithmeticError)  a parameter became NaN or infinite
    ├── StoreError                          the object store
    │   ├── StoreUnavailableError           it cannot be reached, read or written
    │   ├── ObjectNotFoundError (LookupError)  the key does not exist
    │   ├── CorruptedObjectError            an object is truncated or its checksum is wrong
    │   └── FormatError                     another version of diloco-core has written it
    ├── RendezvousError                     the replicas do not form one run
    │   ├── RendezvousTimeoutError          some ranks never arrived
    │   ├── RunExistsError                  the prefix is another run's, or the rank is taken
    │   └── MismatchError                   replicas disagree on model, world size or settings
    ├── AfterRunError                       the trainer failed when its replica had left the run
    ├── ProcessFailedError                  one of a replica's own processes has failed
    └── SyncError                           a sync cannot be completed
        ├── SyncTimeoutError (TimeoutError)  some ranks did not contribute in time
        ├── ReplicaLostError                a replica died or failed
        ├── FencedError                     a newer incarnation of this rank has taken over
        ├── DivergedError                   this replica computes other values than the others
        ├── ModelChangedError               a tensor of the model cannot be synced any more
        ├── NonFiniteUpdateError (ArithmeticError)  a sync would make a tensor NaN or infinite
        ├── UnseenStepsError                an optimizer that the loop does not know trains
        └── UnequalSyncsError               a replica left after fewer syncs than the others
"""

from collections.abc import Sequence

from diloco_protocol import DilocoError


class CoreError(DilocoError):
    """Base of every error raised by diloco-core."""


class ConfigurationError(CoreError, ValueError):
    """Raised when an argument is not allowed; nothing has been started or written."""

    final = True


class NonFiniteDeltaError(CoreError, ArithmeticError):
    """Raised when a replica's contribution holds NaN or infinity; it is never sent.

    Attributes:
        tensor: Name of the tensor.
        rank: The replica.
    """

    def __init__(self, tensor: str, rank: int) -> None:
        super().__init__(
            f"the contribution of rank {rank} is not finite: tensor {tensor!r} holds NaN or "
            "infinity. Nothing was sent. Lower the inner learning rate, clip gradients or look at "
            "the last batches."
        )
        self.tensor = tensor
        self.rank = rank


class StoreError(CoreError):
    """Base of the errors of an object store."""


class StoreUnavailableError(StoreError):
    """Raised when a store cannot be used: missing bucket, no permission, no answer, no room.

    Attributes:
        lasting: Whether the fault stays until the user fixes it, so waiting is of no use.
        anew: Whether an object may be written if it is sent again from its beginning, which only
            the caller can do.
    """

    def __init__(self, message: str, *, lasting: bool = False, anew: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting
        self.anew = anew


class ObjectNotFoundError(StoreError, LookupError):
    """Raised when a key does not exist."""


class CorruptedObjectError(StoreError):
    """Raised when an object is truncated, is not what its key says, or fails its checksum.

    Attributes:
        unread: Whether it was not read, since it is larger than any object of its kind.
    """

    unread = False


class FormatError(StoreError):
    """Raised when a record of the run has a format that this version of diloco-core cannot read."""


class RendezvousError(CoreError):
    """Base of the errors of the start of a run."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Raised when some ranks did not arrive in time.

    Attributes:
        missing: The ranks that did not arrive.
    """

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class RunExistsError(RendezvousError):
    """Raised when the prefix holds another run, or another process has taken the replica's rank."""

    final = True


class MismatchError(RendezvousError):
    """Raised when two replicas disagree on the model, the world size or the settings."""

    final = True


class AfterRunError(CoreError):
    """Raised when a trainer fails after its replica has left its run, which was fixed.

    The replica is not started again: it would be refused, since the run needs it no longer.
    """

    final = True


class ProcessFailedError(CoreError):
    """Raised where several processes are one replica and one of them has failed.

    Attributes:
        process: Its number in the replica, from 0; None if it is not known which one it was.
        exit_code: Its exit code, or minus the number of the signal that ended it; None if unknown.
    """

    def __init__(
        self, message: str, process: int | None = None, exit_code: int | None = None
    ) -> None:
        super().__init__(message)
        self.process, self.exit_code = process, exit_code


class SyncError(CoreError):
    """Base of the errors of a sync."""


class SyncTimeoutError(SyncError, TimeoutError):
    """Raised when a sync was not completed in time.

    Attributes:
        missing: The ranks that this replica was waiting for.
    """

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class ReplicaLostError(SyncError):
    """Raised when another replica died or failed.

    Attributes:
        rank: The replica that failed first, whichever replica reported it.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class FencedError(SyncError):
    """Raised when a newer incarnation of this replica's rank has claimed the rank's place.

    This incarnation must stop. A replica that ends with this error is not started again by its
    launch: it would take the place back, and so on for ever.

    Attributes:
        rank: The rank.
        epoch: The number of the incarnation that must stop.
    """

    final = True

    def __init__(self, message: str, rank: int, epoch: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.epoch = epoch


class DivergedError(SyncError):
    """Raised when this replica differs from the others again after it reloaded published state."""


class NonFiniteUpdateError(SyncError, ArithmeticError):
    """Raised when a sync would make a tensor NaN or infinite in the model's dtype.

    The new values are not published.

    Every contribution was finite: it is the sum, or the outer step, that exceeds the dtype's range.

    Attributes:
        tensor: Name of the tensor.
        dtype: The dtype that cannot hold its new values, such as ``float16``.
        sync: Number of the sync, from 1; exchanges of initial values are not counted.
        outer_lr: The outer learning rate; None where the tensor takes no outer step.
    """

    def __init__(
        self,
        tensor: str,
        dtype: object,
        sync: int,
        outer_lr: float | None = None,
        *,
        elastic: bool = False,
    ) -> None:
        what, todo = "the mean over the replicas", "Check the tensors that the replicas pass to it."
        if outer_lr is not None:
            what = f"the outer step (outer learning rate {outer_lr:g})"
            todo = (
                "Lower the outer learning rate in a new run, which can begin from the newest "
                "complete state: export() writes that to a file."
            )
            if elastic:
                todo += (
                    " To continue this run from that state with the same settings, connect with "
                    "resume='newest-whole'."
                )

        self.dtype = str(dtype).removeprefix("torch.")
        super().__init__(
            f"in sync {sync}, {what} makes tensor {tensor!r} NaN or infinite in {self.dtype}. "
            f"The new values were not published. {todo}"
        )
        self.tensor = tensor
        self.sync = sync
        self.outer_lr = outer_lr


class ModelChangedError(SyncError):
    """Raised when the model is no longer the one that the outer loop was made for.

    A tensor was replaced, converted, unfrozen, added, taken away or loaded. It is also raised when
    an inner optimizer holds other tensors, or keeps weights of its own that would undo a sync.

    Attributes:
        tensor: Name of the tensor in the model; empty where it is in an optimizer only.
    """

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


class UnseenStepsError(SyncError):
    """Raised when parameters are trained, but no inner optimizer of the outer loop steps.

    Nothing would be synced.

    Attributes:
        tensor: Name of a parameter that was trained.
    """

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


class UnequalSyncsError(SyncError):
    """Raised when a replica finished after fewer syncs than this one.

    Attributes:
        rank: The replica that left.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
