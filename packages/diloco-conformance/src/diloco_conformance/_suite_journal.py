"""A journal in a store that others can write to: L12."""

from __future__ import annotations

from diloco_protocol import ReplicaState, ReplicaStatus, StoreJournal

from ._check_collect import collect
from ._harness import Step
from ._lab import Lab

LINE = "a line that is kept"


def journal_in_memory() -> StoreJournal:
    """Return a journal in a store of its own, in the memory of this process."""
    objects: dict[str, bytes] = {}

    def read(key: str, most: int) -> bytes | None:
        data = objects.get(key)
        return None if data is None else data[:most]

    return StoreJournal(
        "memory",
        put=objects.__setitem__,
        create=lambda key, data: objects.setdefault(key, data) is data,
        read=read,
        list_keys=lambda folder: [key for key in list(objects) if key.startswith(folder)],
        delete=lambda key: objects.pop(key, None),
    )


class Journals:
    """Fixed tests of L12."""

    def test_l12_a_journal_in_a_store_is_never_above_the_backend(self, lab: Lab) -> None:
        """Forge ends and results: they count only once the backend has no record of the replica."""
        journal = journal_in_memory()
        lab.forget(journal=journal)
        run = lab.up(2)
        (launch,) = journal.look(run.run_id).launches
        if list(launch.handles) != run.handles or launch.options.get("world_size") != 2:
            lab.broken("L12", f"the journal has {launch}", f"the launch of {run.name} and its size")
        for handle in run.handles:
            journal.record_end(handle, ReplicaStatus(ReplicaState.SUCCEEDED), "forged")
        lab.note("another program writes into the journal that both have succeeded", "forge")
        lab.observe_all()
        lab.drive(run.replicas[0], Step.SUCCEED, "kept")
        lab.drive(run.replicas[1], Step.FAIL, 3)
        lab.settle()
        lab.observe_all()
        before = collect(lab, run.replicas)
        for _ in range(2):
            lab.purge(run)
            lab.forget(journal=journal)
            after = lab.verb("L12", lambda: lab.executor.collect(run.handles, timeout=0))
            if after != before:
                lab.broken("L12", f"after the purge, collect says {after}", f"before: {before}")
        lab.forget()

    def test_l12_a_journal_keeps_the_log_of_who_is_cancelled(self, lab: Lab) -> None:
        """Check that it is there after the records are gone, and that of who has ended, too."""
        lab.needs(Step.PRINT)
        journal = journal_in_memory()
        lab.forget(journal=journal)
        run = lab.up(2)
        for replica in run.replicas:
            lab.drive(replica, Step.PRINT, [LINE])
        lab.drive(run.replicas[0], Step.SUCCEED)
        lab.observe_all()
        lab.cancel(run.replicas[1])
        lab.settle()
        lab.observe_all()
        lab.purge(run)
        for handle in run.handles:
            kept = lab.verb("L12", lambda handle=handle: lab.executor.kept_log(handle))  # type: ignore[misc]
            if LINE not in (kept or "").splitlines():
                lab.broken("L12", f"kept_log gave {kept!r}", f"it had written {LINE!r}")
        lab.forget()
