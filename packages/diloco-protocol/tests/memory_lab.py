"""A backend whose replicas are entries of a dictionary."""

from diloco_protocol import (
    Backoff,
    BaseExecutor,
    Capabilities,
    InvalidRequestError,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    ResultLostError,
    UnavailableError,
)


class Memory(BaseExecutor):
    """A backend whose replicas are entries of a dictionary that the test changes."""

    backend_name = "memory"
    supports_inter_replica_network = False
    capabilities = Capabilities(cancel_scope="replica", log_streams=("stdout",))

    def __init__(self, world, **options):
        super().__init__(backoff=Backoff(sleep=lambda seconds: None), **options)
        self.world = world
        self.hooks = []

    def _plan(self, request):
        return [{"rank": spec.rank, "spec": spec.to_json()} for spec in request.specs()]

    def _submit(self, request):
        self.hooks.append("submit")
        handles = [
            ReplicaHandle(rank, "memory", run_id=request.run_id, world_size=request.world_size)
            for rank in request.ranks
        ]
        self.world.update({handle: ReplicaStatus(ReplicaState.RUNNING) for handle in handles})
        return handles

    def _observe_run(self, handles):
        assert handles, "nothing was asked for"
        return {handle: self.world[handle] for handle in handles if handle in self.world}

    def _result(self, handle):
        return {"rank": handle.rank}

    def _stop(self, handle):
        self.hooks.append("stop")
        if handle in self.world and not self.world[handle].state.terminal:
            self.world[handle] = ReplicaStatus(
                ReplicaState.CANCELLED, reason=Reason.CANCEL_REQUESTED
            )

    def _purge(self, handle):
        self.world.pop(handle, None)

    def _logs(self, handle, query):
        lines = [f"line {number}" for number in range(5)]
        return iter(lines[-query.n_lines :] if query.n_lines else lines)

    def _list_runs(self):
        return sorted({handle.run_id for handle in self.world})

    def _attach(self, run_id):
        found = [handle for handle in self.world if handle.run_id == run_id]
        if not found:
            raise ReplicaNotFoundError(f"no run {run_id}")
        return found


DONE = ReplicaStatus(ReplicaState.SUCCEEDED, reason=Reason.COMPLETED)


def unavailable():
    raise UnavailableError("no result today")


def lost():
    raise ResultLostError("the disk is gone")


class Asked(Memory):
    """Keeps what it was asked for."""

    def _check_request(self, request):
        if request.spot:
            raise InvalidRequestError("spot=True cannot be had in memory")
        self.asked = request

    def _submit(self, request):
        assert request == self.asked
        return super()._submit(request)
