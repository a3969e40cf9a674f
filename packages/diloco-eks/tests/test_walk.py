"""Whatever happens in the cluster: answers are in order, and true once all is quiet."""

import threading

import pytest
from eks_lab import PATIENCE
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from diloco_localcloud import KubernetesStandIn
from diloco_protocol import Reason, ReplicaState

RANKS = 3
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["start", "succeed", "fail", "evict", "oom", "delete"]),
            st.integers(0, RANKS - 1),
        ),
        st.tuples(st.sampled_from(["advance"]), st.sampled_from([0.3, 1.2, 4.0, 12.0, 25.0])),
        st.tuples(st.sampled_from(["cancel", "suspend", "resume", "fresh"]), st.none()),
    ),
    min_size=3,
    max_size=25,
)


class Observer:
    """Watches the replicas, and that no observation contradicts an earlier one."""

    def __init__(self, executor, handles):
        self.executor = executor
        self.handles = handles
        self.seen = {}

    def look(self, cancelled):
        for handle in self.handles:
            status = self.executor.describe(handle)
            note(
                f"{handle.rank}: {status.state} {status.attempt} {status.reason} "
                f"{'stopping' * status.stopping}"
            )
            before = self.seen.get(handle)
            if before is not None and before.state.terminal:
                assert status == before
            elif before is not None:
                assert status.attempt >= before.attempt
                if (before.state, status.state) == ("running", "pending"):
                    assert status.attempt > before.attempt
            if status.state is ReplicaState.CANCELLED:
                assert cancelled
            self.seen[handle] = status


@pytest.mark.parametrize("choice", ["fail_run", "continue"])
@given(steps=STEPS, restarts=st.integers(0, 1))
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_a_random_walk(a_bench, tmp_path, choice, steps, restarts):
    with KubernetesStandIn(tls=False) as stand_in:
        bench = a_bench(stand_in, tmp_path)
        try:
            walk(bench, choice, steps, restarts)
        finally:
            bench.close()


def walk(bench, choice, steps, restarts):
    run = bench.launch(
        RANKS,
        start=False,
        max_restarts=restarts,
        executor=bench.executor(on_replica_failure=choice),
    )
    observers = [Observer(run.executor, run.handles)]
    cancelled = False
    for action, value in steps:
        note(f"{action} {value}")
        if action == "advance":
            bench.world.advance(value)
        elif action == "cancel":
            run.executor.cancel(run.handles[0])
            cancelled = True
        elif action in {"suspend", "resume"}:
            finished = any(
                c["type"] in {"Complete", "Failed"}
                for c in bench.world.job("run-1")["status"].get("conditions", [])
            )
            if not (cancelled or finished):
                run.executor._cluster.patch_job(
                    "default", "run-1", {"spec": {"suspend": action == "suspend"}}
                )
        elif action == "fresh":
            observers.append(Observer(bench.executor(), run.handles))
        else:
            act(bench, action, value)
        for observer in observers:
            observer.look(cancelled)
    if not cancelled:
        run.executor.cancel(run.handles[0])
    bench.world.settle(within=60, most=900)
    told = []
    for observer in [*observers, Observer(bench.executor(), run.handles)]:
        observer.look(cancelled=True)
        told.append(list(observer.seen.values()))
    # Who watched knows what nobody can know later: that somebody deleted a pod.
    for knowing, late in (
        (each, last) for seen in told for each, last in zip(seen, told[-1], strict=False)
    ):
        assert knowing.state == late.state
        if knowing.reason is not Reason.PLATFORM:
            assert (knowing.reason, knowing.exit_code) == (late.reason, late.exit_code)
    assert not any(pod.alive for pod in bench.world.pods())
    status = bench.world.job("run-1")["status"]
    for index in range(RANKS):
        assert (told[0][index].state == "succeeded") == (
            str(index) in expanded(status.get("completedIndexes", ""))
        )
        if str(index) in expanded(status.get("failedIndexes", "")):
            assert told[0][index].state == "failed"


def expanded(text):
    found = set()
    for token in text.split(",") if text else []:
        first, _, last = token.partition("-")
        found |= {str(index) for index in range(int(first), int(last or first) + 1)}
    return found


def act(bench, action, rank):
    try:
        pod = bench.world.pod("run-1", rank)
        if action in {"succeed", "fail", "oom"} and not pod.alive:
            return
        if pod.json["status"]["phase"] in {"Succeeded", "Failed"}:
            return
        getattr(pod, action)()
    except LookupError:
        return


def test_many_threads_share_an_executor(bench, report):
    run = bench.launch(4)
    results, problems = [], []

    def collect():
        try:
            results.append(run.executor.collect(run.handles, timeout=500))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=collect) for _ in range(6)]
    for thread in threads:
        thread.start()
    for rank in range(4):
        run.pod(rank).succeed(report(rank)[0])
    for thread in threads:
        thread.join(PATIENCE)
    assert problems == []
    assert [[result["result"] for result in found] for found in results] == [[0, 1, 2, 3]] * 6
