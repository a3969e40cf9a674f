"""A handle is text that travels.

Whatever it says, only Jobs that diloco launched for its run are seen, ended and removed.
"""

import gc
import tracemalloc

import pytest

from diloco_eks import EKSExecutor
from diloco_eks._client._answers import own_answer
from diloco_eks._client._cluster import Cluster
from diloco_eks._client._errors import ConflictError
from diloco_protocol import (
    BackendError,
    FolderJournal,
    InvalidRequestError,
    LaunchError,
    ReplicaHandle,
    ReplicaNotFoundError,
    RunConflictError,
)

VERBS = {
    "describe": lambda executor, handle: executor.describe(handle),
    "poll": lambda executor, handle: executor.poll(handle),
    "collect": lambda executor, handle: executor.collect([handle], timeout=0),
    "cancel": lambda executor, handle: executor.cancel(handle),
    "purge": lambda executor, handle: executor.purge(handle),
    "stream_logs": lambda executor, handle: executor.stream_logs(handle),
    "log_iter": lambda executor, handle: list(executor.log_iter(handle)),
}


@pytest.fixture(params=VERBS)
def verb(request):
    return VERBS[request.param]


def job_of(bench, name):
    """The JSON of a Job, but for what the cluster changes of it by itself."""
    job = bench.world.job(name)
    spec = {
        key: job["spec"].get(key) for key in ("suspend", "activeDeadlineSeconds", "parallelism")
    }
    metadata = job["metadata"]
    return metadata["uid"], metadata.get("annotations"), metadata.get("deletionTimestamp"), spec


def forged(handle, run_id=None, **metadata):
    """A handle of which some things were changed."""
    return ReplicaHandle(
        handle.rank,
        "eks",
        {**handle.metadata, **metadata},
        run_id=run_id or handle.run_id,
        world_size=handle.world_size,
    )


def somebody_elses(bench, name, *, labels=None, space="default"):
    """A Job that diloco did not launch, and that runs; returns its JSON."""
    container = {"name": "main", "image": "another/image:1"}
    pod = {"restartPolicy": "Never", "containers": [container]}
    body = {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"template": {"spec": pod}},
    }
    return bench.create(f"/apis/batch/v1/namespaces/{space}/jobs", body)


def tried(verb, executor, handle):
    """What a verb raised; what is gone is no error for some, and lost for collect."""
    try:
        verb(executor, handle)
    except BackendError as error:
        return error
    return None


@pytest.mark.sampled
@pytest.mark.parametrize("uid", ["the Job's", ""])
@pytest.mark.parametrize(
    "labels",
    [{}, {"diloco.dev/run-id": "theirs"}, {"app.kubernetes.io/managed-by": "diloco"}],
    ids=["no labels", "run-id", "managed-by"],
)
def test_a_job_that_diloco_has_not_launched(bench, verb, labels, uid):
    run = bench.launch(1)
    job = somebody_elses(bench, "theirs", labels=labels)
    before = job_of(bench, "theirs")
    place = {"job_name": "theirs", "job_uid": uid and job["metadata"]["uid"], "fingerprint": ""}
    tried(verb, run.executor, forged(run.handles[0], "theirs", **place))
    bench.world.settle()
    assert job_of(bench, "theirs") == before
    assert job_of(bench, "run-1") is not None


@pytest.mark.sampled
def test_a_job_of_another_run(bench, verb):
    """Whose uid the handle has, and whose name it has not."""
    one, two = bench.launch(1, run_id="one"), bench.launch(1, run_id="two")
    before = job_of(bench, "two")
    uid = two.handles[0].metadata["job_uid"]
    for handle, error in (
        (forged(one.handles[0], job_name="two", job_uid=uid), InvalidRequestError),
        (forged(one.handles[0], "two"), InvalidRequestError),
        (forged(one.handles[0], "two", job_name="two"), None),  # an old handle
    ):
        raised = tried(verb, one.executor, handle)
        assert error is None or isinstance(raised, error)
        bench.world.settle()
        assert job_of(bench, "two") == before


@pytest.mark.sampled
def test_another_namespace(bench, verb):
    bench.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    theirs = bench.launch(1, executor=bench.executor(namespace="team"), start=False)
    mine = bench.executor()
    with pytest.raises(InvalidRequestError) as caught:
        verb(mine, theirs.handles[0])
    assert "leads to the namespace 'team', and this executor works in 'default'" in str(
        caught.value
    )
    assert "other_namespaces=" in str(caught.value)


def test_another_namespace_may_be_allowed(bench):
    bench.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    handles = bench.executor(namespace="team").launch_replicas(1, "a:b", run_id="run-1")
    allowed = bench.executor(other_namespaces=["team"])
    assert allowed.poll(handles[0]) == "pending"
    allowed.cancel(handles[0])
    bench.world.settle(within=15.0)
    assert allowed.poll(handles[0]) == "cancelled"
    allowed.purge(handles[0])
    assert allowed.list_runs() == []


@pytest.mark.parametrize("names", ["team", ["No_Name"], [1]])
def test_namespaces_that_are_none(names):
    with pytest.raises(InvalidRequestError, match="other_namespaces"):
        EKSExecutor("image", other_namespaces=names)


@pytest.mark.sampled
@pytest.mark.parametrize("run_id", ["../../secrets", "A", "a/b", "", "-a", "a" * 64])
def test_a_run_id_that_no_launch_could_have_made(bench, verb, run_id):
    handle = bench.launch(1).handles[0]
    wrong = ReplicaHandle(
        0, "eks", {**handle.metadata, "job_name": run_id}, run_id=run_id, world_size=1
    )
    with pytest.raises(InvalidRequestError):
        verb(bench.executor(), wrong)


def unheard(bench, **options):
    """The survivors of a launch of which nobody knows whether it happened; it has not."""
    executor = bench.executor(retry_timeout=2)
    bench.stand_in.faults.add("server_error", times=None)
    with pytest.raises(LaunchError) as caught:
        executor.launch_replicas(1, "trainer:train", run_id="run-1", **options)
    bench.stand_in.faults.clear()
    return executor, list(caught.value.survivors)


@pytest.mark.sampled
@pytest.mark.parametrize("whose", ["not diloco's", "another launch's"])
def test_a_survivor_of_an_unknown_launch_ends_nobody_elses_job(bench, verb, whose):
    executor, survivors = unheard(bench)
    assert survivors[0].metadata["job_uid"] == ""
    if whose == "not diloco's":
        somebody_elses(bench, "run-1")
    else:
        bench.launch(1, kwargs={"other": 1})
    before = job_of(bench, "run-1")
    tried(verb, executor, survivors[0])
    bench.world.settle()
    assert job_of(bench, "run-1") == before


def test_a_survivor_of_an_unknown_launch_ends_its_own(bench):
    executor, survivors = unheard(bench)
    bench.launch(1)  # the same launch, under way until now
    assert executor.poll(survivors[0]) == "running"
    executor.cancel(survivors[0])
    bench.world.settle(within=15.0)
    assert executor.poll(survivors[0]) == "cancelled"


def odd(bench, name, *, labels=None, annotations=None, completions=2):
    """A Job with our labels that diloco did not launch."""
    marks = {"diloco.dev/run-id": name, "app.kubernetes.io/managed-by": "diloco-eks"}
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "another:1"}]}
    metadata = {"name": name, "labels": marks | (labels or {}), "annotations": annotations or {}}
    spec = {"completions": completions, "parallelism": 1, "completionMode": "Indexed"}
    body = {"metadata": metadata, "spec": {**spec, "template": {"spec": pod}}}
    bench.create("/apis/batch/v1/namespaces/default/jobs", body)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("labels", "annotations"),
    [
        ({"diloco.dev/run-id": "run-1"}, {"world-size": "2", "first-rank": "0"}),
        ({}, {"world-size": "2"}),
        ({}, {"world-size": "1", "first-rank": "0"}),
        ({}, {"world-size": "9" * 5000, "first-rank": "0"}),
        ({}, {"world-size": "2", "first-rank": "-1"}),
        ({}, {"world-size": "٣", "first-rank": "0"}),
    ],
    ids=["another run's label", "no rank", "too small", "long", "negative", "arabic"],
)
def test_labels_alone_make_no_run(bench, labels, annotations):
    run = bench.launch(1)
    marks = {f"diloco.dev/{name}": value for name, value in annotations.items()}
    odd(bench, "odd", labels=labels, annotations=marks)
    assert run.executor.list_runs() == ["run-1"]
    with pytest.raises(ReplicaNotFoundError, match="was not launched by diloco"):
        run.executor.attach("odd")
    assert run.states() == ["running"]


def test_a_pod_of_somebody_elses_is_no_rank(bench, report):
    """It carries all our labels, but another one owns it."""
    run = bench.launch(2)
    ours = sorted(pod.name for pod in bench.pods(run.handles[0]))
    pod = run.pod(0).json
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "another"}
    metadata = {
        "name": "run-1-0-aaaaa",
        "labels": pod["metadata"]["labels"],
        "annotations": pod["metadata"]["annotations"],
        "ownerReferences": [{**owner, "controller": True}],
    }
    container = {"name": "replica", "image": "another/image:1"}
    body = {"metadata": metadata, "spec": {"restartPolicy": "Never", "containers": [container]}}
    bench.create("/api/v1/namespaces/default/pods", body)
    bench.world.advance(1)
    assert run.states() == ["running", "running"]
    run.pod(1).log("mine\n")
    assert run.executor.stream_logs(run.handles[1]) == "mine"
    pods, _ = run.executor._cluster.list_pods("default", run.handles[0].metadata["job_uid"])
    assert sorted(pod.name for pod in pods) == ours


@pytest.mark.sampled
@pytest.mark.parametrize("first", ["9" * 5000, "٣", "-1", "1e3", "", "2"])
def test_a_first_rank_that_no_launch_could_have_written(bench, verb, first):
    handle = bench.launch(1).handles[0]
    with pytest.raises(InvalidRequestError, match="its first_rank must be a whole number"):
        verb(bench.executor(), forged(handle, first_rank=first))


def test_what_no_launch_can_be_called_is_no_run(bench):
    name = "a" * 49
    labels = {"app.kubernetes.io/managed-by": "diloco-eks", "diloco.dev/run-id": name}
    ranks = {"diloco.dev/first-rank": "0", "diloco.dev/world-size": "1"}
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "another/image:1"}]}
    spec = {"completions": 1, "completionMode": "Indexed", "suspend": True}
    body = {
        "metadata": {"name": name, "labels": labels, "annotations": ranks},
        "spec": {**spec, "template": {"spec": pod}},
    }
    bench.create("/apis/batch/v1/namespaces/default/jobs", body)
    assert bench.executor().list_runs() == []


def test_a_long_server_in_a_handle_is_cut(bench):
    run = bench.launch(1)
    handle = forged(run.handles[0], server="https://" + "s" * 300_000, job_uid="another")
    with pytest.raises(InvalidRequestError, match="this handle belongs to the cluster at") as error:
        run.executor.describe(handle)
    assert len(str(error.value)) < 1000


def test_of_a_list_no_more_is_kept_than_is_read_of_it(bench, monkeypatch):
    """All pages of a list together have no bound, and whoever may create pods may fill them."""
    monkeypatch.setattr("diloco_eks._client._cluster.PAGE", 2)
    run = bench.launch(5, env={"LARGE": "x" * 100_000})
    cluster, uid = run.executor._cluster, run.handles[0].metadata["job_uid"]
    cluster.list_pods("default", uid)
    tracemalloc.start()
    try:
        pods, _ = cluster.list_pods("default", uid)
        assert len(pods) == 5
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 300_000
    finally:
        tracemalloc.stop()


CHANGES = {
    "no label": {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}},
    "no run": {"metadata": {"labels": {"diloco.dev/run-id": None}}},
    "no rank": {"metadata": {"annotations": {"diloco.dev/first-rank": None}}},
    "an odd size": {"metadata": {"annotations": {"diloco.dev/world-size": "x"}}},
}


def change(bench, name, patch, space="default"):
    path = f"/apis/batch/v1/namespaces/{space}/jobs/{name}"
    bench.create(path, patch, "PATCH", "application/merge-patch+json")


@pytest.mark.sampled
@pytest.mark.parametrize("changed", CHANGES)
def test_a_job_that_was_changed_is_not_called_gone(bench, verb, changed):
    """A cancel that did nothing would leave its pods, and say nothing."""
    run = bench.launch(1)
    change(bench, "run-1", CHANGES[changed])
    for executor in (run.executor, bench.executor()):
        with pytest.raises(BackendError, match=r"of diloco was changed .*pods may be running"):
            verb(executor, run.handles[0])


@pytest.mark.sampled
def test_a_job_without_its_fingerprint_is_not_called_gone(bench, verb):
    """By the handle of a survivor, which has no uid."""
    executor, survivors = unheard(bench)
    bench.launch(1)
    change(bench, "run-1", {"metadata": {"annotations": {"diloco.dev/fingerprint": None}}})
    with pytest.raises(BackendError, match=r"of diloco was changed .*pods may be running"):
        verb(executor, survivors[0])


@pytest.mark.sampled
@pytest.mark.parametrize("find", ["attach", "exists", "cancel_run"])
@pytest.mark.parametrize("changed", CHANGES)
def test_a_job_that_was_changed_is_not_called_unknown(bench, find, changed):
    bench.launch(1)
    change(bench, "run-1", CHANGES[changed])
    with pytest.raises(BackendError, match=r"of diloco was changed .*pods may be running"):
        getattr(bench.executor(), find)("run-1")


@pytest.mark.sampled
def test_a_job_without_any_of_our_marks_is_not_called_gone(bench, verb):
    executor, survivors = unheard(bench)
    somebody_elses(bench, "run-1")
    with pytest.raises(BackendError, match=r"of diloco was changed .*pods may be running"):
        verb(executor, survivors[0])


@pytest.mark.sampled
def test_pods_that_live_on_after_their_job_are_named(bench, verb):
    """A Job that is deleted without a propagation policy leaves its pods."""
    run = bench.launch(2)
    run.pod(0).start()
    bench.create("/apis/batch/v1/namespaces/default/jobs/run-1", {}, "DELETE")
    bench.world.settle()
    survivor = forged(run.handles[0], job_uid="", fingerprint="0" * 64)
    for handle in (run.handles[0], run.handles[0], survivor):
        with pytest.raises(BackendError, match=r"without its pods, and 2 .*kubectl delete pods"):
            verb(run.executor, handle)
    for find in (run.executor.attach, run.executor.exists, run.executor.cancel_run):
        with pytest.raises(BackendError, match=r"without its pods, and 2 .*kubectl delete pods"):
            find("run-1")
    for rank in (0, 1):
        name = run.pod(rank).json["metadata"]["name"]
        bench.create(f"/api/v1/namespaces/default/pods/{name}", {}, "DELETE")
    bench.world.settle(within=60)
    run.executor.cancel(run.handles[0])
    assert run.executor.collect(run.handles)[1]["reason"] == "lost"


def test_a_conflict_about_something_else_is_waited_out(bench, monkeypatch):
    """Two launches that meet in a quota: the 409 is not about a Job of that name."""
    executor = bench.executor()
    create, met = executor._cluster.create_job, []

    def refused(*args, **options):
        if not met:
            met.append(1)
            raise ConflictError("Operation cannot be fulfilled on resourcequotas q")
        return create(*args, **options)

    monkeypatch.setattr(executor._cluster, "create_job", refused)
    assert executor.launch_replicas(1, "trainer:train", {}, run_id="run-1")
    met.clear()
    (finding,) = [each for each in executor.check(1, run_id="run-2") if each.subject == "manifest"]
    assert finding.ok


def test_an_end_that_was_told_stays_true_of_a_job_that_was_changed(bench, report):
    run = bench.launch(1)
    run.pod(0).succeed(report(0)[0])
    bench.world.settle(within=15)
    status = run.executor.describe(run.handles[0])
    assert status.state == "succeeded"
    change(bench, "run-1", CHANGES["no label"])
    assert run.executor.describe(run.handles[0]) == status


def test_namesakes_in_two_namespaces_do_not_hide_each_other(bench, report):
    bench.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    bench.launch(1, executor=bench.executor(namespace="team"))
    run = bench.launch(1)
    run.pod(0).succeed(report(0)[0])
    bench.world.settle(within=15)
    theirs = forged(
        run.handles[0],
        namespace="team",
        job_uid=bench.world.job("run-1", "team")["metadata"]["uid"],
    )
    executor = bench.executor(other_namespaces=["team"])
    change(bench, "run-1", CHANGES["no label"], space="team")
    seen = []
    with pytest.raises(
        BackendError, match=r"Job team/run-1 is there, but what says .* was changed"
    ) as caught:
        executor.collect([theirs, run.handles[0]], timeout=60, progress=seen.append)
    assert {handle.metadata["namespace"]: status.state for handle, status in seen[-1].items()} == {
        "default": "succeeded"
    }
    assert "1 of 2 handles" in caught.value.__notes__[0]


@pytest.mark.parametrize("changed", CHANGES)
def test_a_launch_does_not_take_a_job_that_was_changed(bench, changed):
    run = bench.launch(1)
    change(bench, "run-1", CHANGES[changed])
    with pytest.raises(RunConflictError, match="or was changed since"):
        run.executor.launch_replicas(1, "trainer:train", {}, run_id="run-1")


@pytest.mark.parametrize("completions", [7, 10**9])
def test_a_copied_fingerprint_makes_no_run(bench, completions):
    run = bench.launch(2)
    marks = bench.world.job("run-1")["metadata"]["annotations"]
    run.executor.cancel(run.handles[0])
    bench.world.settle(within=30)
    run.executor.purge(run.handles[0])
    odd(bench, "run-1", annotations=marks, completions=completions)
    with pytest.raises(RunConflictError, match="or was changed since"):
        run.executor.launch_replicas(2, "trainer:train", {}, run_id="run-1")


@pytest.mark.parametrize("answer", ["no uid", "many completions"])
def test_an_answer_to_a_create_that_is_another_job(bench, monkeypatch, answer):
    """The Job that was created is found all the same, by its name and fingerprint."""
    executor, create = bench.executor(), Cluster.create_job

    def created(cluster, manifest, **options):
        job = create(cluster, manifest, **options)
        if answer == "no uid":
            return own_answer({"kind": "Job", "metadata": {"name": "run-1"}}, "x", "Job", "run-1")
        return {**job, "spec": {**job["spec"], "completions": 10**6}}

    monkeypatch.setattr(Cluster, "create_job", created)
    handles = executor.launch_replicas(2, "trainer:train", {}, run_id="run-1")
    assert handles == bench.executor().attach("run-1")


def test_a_purge_with_a_journal_waits_out_a_passing_fault(bench, tmp_path):
    run = bench.launch(1, executor=bench.executor(journal=FolderJournal(tmp_path / "journal")))
    run.executor.cancel(run.handles[0])
    bench.world.settle(within=30)
    bench.stand_in.faults.add("throttle", times=2)
    run.executor.purge(run.handles[0])
    assert run.executor.list_runs() == []


@pytest.mark.parametrize("known_by", ["another executor", "a launch of which nothing was heard"])
def test_a_purge_writes_down_the_ends_of_all_ranks(bench, report, tmp_path, known_by):
    """Also of a run that neither journal nor attach knows: a removed one could not be asked for."""
    journal = FolderJournal(tmp_path / "journal")
    if known_by == "another executor":
        bench.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
        run = bench.launch(2, executor=bench.executor(namespace="team"))
        handles = run.handles
    else:
        run = bench.launch(2)
        marks = bench.world.job("run-1")["metadata"]["annotations"]
        place = {"job_uid": "", "fingerprint": marks["diloco.dev/fingerprint"]}
        handles = [forged(handle, **place) for handle in run.handles]
    for rank in (0, 1):
        run.pod(rank).succeed(report(rank)[0])
    bench.world.settle(within=15)
    executor = bench.executor(journal=journal, other_namespaces=["team"])
    executor.purge(handles[0])
    assert [entry["result"] for entry in executor.collect(handles, timeout=1)] == [0, 1]


@pytest.mark.parametrize("seen", [False, True])
def test_a_purge_writes_down_the_ends_for_the_handles_of_the_journal(bench, report, tmp_path, seen):
    """By the handle of a survivor, of a launch that was repeated as its error advises."""
    executor = bench.executor(journal=FolderJournal(tmp_path / "journal"))
    run = bench.launch(1, executor=executor)
    marks = bench.world.job("run-1")["metadata"]["annotations"]
    survivor = forged(run.handles[0], job_uid="", fingerprint=marks["diloco.dev/fingerprint"])
    run.pod(0).succeed(report(0)[0])
    bench.world.settle(within=15)
    other = bench.executor(journal=FolderJournal(tmp_path / "journal"))
    if seen:
        other.collect([survivor])
    other.purge(survivor)
    for handle in (survivor, run.handles[0]):
        (entry,) = bench.executor(journal=executor._journal).collect([handle], timeout=1)
        assert entry["result"] == 0


def test_a_purge_in_another_namespace_is_not_refused_for_a_namesake(bench, tmp_path):
    bench.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    run = bench.launch(1, executor=bench.executor(namespace="team"))
    run.executor.cancel(run.handles[0])
    bench.world.settle(within=30)
    bench.launch(1)
    change(bench, "run-1", CHANGES["no label"])
    executor = bench.executor(
        other_namespaces=["team"], journal=FolderJournal(tmp_path / "journal")
    )
    executor.purge(run.handles[0])
    assert run.executor.list_runs() == []


def test_names_are_looked_for_in_the_own_namespace_alone(bench, tmp_path):
    bench.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    journal = FolderJournal(tmp_path / "journal")
    theirs = bench.launch(1, executor=bench.executor(namespace="team", journal=journal))
    executor = bench.executor(other_namespaces=["team"], journal=journal)
    for find in (executor.attach, executor.cancel_run):
        with pytest.raises(ReplicaNotFoundError):
            find("run-1")
    assert executor.describe(theirs.handles[0]).stopping is False


def test_a_check_of_a_launch_that_is_there_says_what_is_known(bench):
    run = bench.launch(1)
    (finding,) = [
        each for each in run.executor.check(1, run_id="run-1") if each.subject == "manifest"
    ]
    assert finding.ok is None
    assert "the launch that made it finds it again" in finding.message
