"""What every backend gets from the base class, shown on one that lives in a dictionary."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from memory_lab import DONE, Asked, Memory, unavailable

from diloco_protocol import (
    BackendError,
    Capabilities,
    Finding,
    FolderJournal,
    InvalidRequestError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
    SpecVersionError,
    UnavailableError,
)


def test_it_is_an_executor(executor):
    assert isinstance(executor, ServerlessExecutor)


def test_launch_watch_collect(executor):
    handles = executor.launch_replicas(3, "m:f", {"a": 1})
    assert [handle.rank for handle in handles] == [0, 1, 2]
    assert {executor.poll(handle) for handle in handles} == {ReplicaState.RUNNING}
    executor.world.update(dict.fromkeys(handles, DONE))
    assert [result["result"] for result in executor.collect(handles)] == [
        {"rank": 0},
        {"rank": 1},
        {"rank": 2},
    ]
    assert executor.list_runs() == [handles[0].run_id]
    assert executor.attach(handles[0].run_id) == handles


def gone(handles):
    raise ReplicaNotFoundError("there is no such run")


def test_a_run_is_described_with_one_look(executor, monkeypatch):
    handles = executor.launch_replicas(3, "m:f", {})
    del executor.world[handles[1]]
    looks = []
    observe = executor._observe_run
    monkeypatch.setattr(executor, "_observe_run", lambda ask: looks.append(ask) or observe(ask))
    found = executor.describe_run(iter(handles))
    assert looks == [handles]
    assert found == {handle: executor.describe(handle) for handle in (handles[0], handles[2])}
    assert executor.describe_run([]) == {}
    monkeypatch.setattr(executor, "_observe_run", gone)
    assert executor.describe_run(handles) == {}
    with pytest.raises(InvalidRequestError, match="'eks'"):
        executor.describe_run([*handles, ReplicaHandle(0, "eks", run_id="a")])


def test_replicas_of_several_runs_are_described(executor, monkeypatch):
    one, other = (executor.launch_replicas(2, "m:f", {}, run_id=name) for name in ("one", "other"))
    looks = []
    observe = executor._observe_run
    monkeypatch.setattr(executor, "_observe_run", lambda ask: looks.append(ask) or observe(ask))
    mixed = [other[0], one[0], other[1], other[0]]
    assert set(executor.describe_run(mixed)) == {other[0], other[1], one[0]}
    assert looks == [other, one[:1]]
    monkeypatch.setattr(
        executor, "_observe_run", lambda ask: gone(ask) if ask == one else observe(ask)
    )
    assert set(executor.describe_run([*one, *other])) == set(other), "the others are still told"
    with pytest.raises(InvalidRequestError, match="describe_run takes a list of handles, not 5"):
        executor.describe_run(5)


def test_where_replicas_meet_is_not_known_unless_the_backend_says_it(executor):
    (handle,) = executor.launch_replicas(1, "m:f", {"rendezvous_uri": "s3://bucket/run"})
    assert executor.meets_at(handle) is None


def test_a_record_of_another_version_is_an_error_of_the_backend(executor, monkeypatch):
    (handle,) = executor.launch_replicas(1, "m:f", run_id="one")

    def refuse(handle):
        raise SpecVersionError("this replica's spec has version 99")

    monkeypatch.setattr(executor, "_rendezvous", refuse)
    with pytest.raises(BackendError, match=r"rank 0 of run 'one': .* has version 99"):
        executor.meets_at(handle)


def test_the_options_of_a_class_are_known_without_an_executor():
    assert Memory.options() == []


def test_the_call_of_the_original_protocol(executor):
    handles = executor.launch_replicas(2, "m.f", {}, gpu="A100", timeout=60)
    assert executor.poll(handles[0]) == "running"
    assert executor.stream_logs(handles[0], n_lines=2) == "line 3\nline 4"
    executor.cancel(handles[0])
    executor.cancel(handles[0])
    assert executor.poll(handles[0]) == "cancelled"
    (result,) = executor.collect([handles[0]], timeout=1)
    assert {"rank", "status", "exit_code", "error", "result"} <= result.keys()


@pytest.mark.parametrize(
    "change", [{"n_replicas": 0}, {"entrypoint": "nonsense"}, {"timeout": -1}, {"run_id": "No"}]
)
def test_nothing_is_submitted_that_is_not_allowed(executor, change):
    arguments = {"n_replicas": 1, "entrypoint": "m:f", "entrypoint_args": {}, **change}
    with pytest.raises(InvalidRequestError):
        executor.launch_replicas(**arguments)
    assert executor.hooks == []


class Placed(Memory):
    """Says where replicas run."""

    where = "region-1"

    def _where(self):
        return self.where


class TestThePlace:
    @staticmethod
    def planned(executor):
        (request,) = executor.plan(1, "m:f").requests
        return ReplicaSpec.from_json(request["spec"])

    def test_replicas_are_told_it(self):
        spec = self.planned(Placed({}))
        assert (spec.backend, spec.place) == ("memory", "region-1")
        assert self.planned(Memory({})).place == ""

    def test_it_is_bounded_and_has_no_secrets(self):
        executor = Placed({})
        executor.where = "https://me:hunter2@here/" + "x" * 1000
        place = self.planned(executor).place
        assert "hunter2" not in place
        assert len(place) == 121
        executor.where = "\x1b[2Jhere"
        assert self.planned(executor).place == "\\x1b[2Jhere"

    @pytest.mark.parametrize("name", ["DILOCO_BACKEND", "DILOCO_PLACE"])
    def test_a_launch_may_not_say_it(self, name):
        with pytest.raises(InvalidRequestError, match=f"env may not set {name}"):
            Memory({}).launch_replicas(1, "m:f", env={name: "there"})


class TestDefaultsOfTheConstructor:
    def test_the_launch_wins_over_them(self):
        executor = Asked({}, env={"A": "1", "B": "1"}, max_restarts=2)
        executor.launch_replicas(1, "m:f")
        assert (executor.asked.env, executor.asked.max_restarts) == ({"A": "1", "B": "1"}, 2)
        executor.launch_replicas(1, "m:f", env={"B": "2", "C": "3"}, max_restarts=0)
        assert executor.asked.env == {"A": "1", "B": "2", "C": "3"}
        assert executor.asked.max_restarts == 0

    def test_a_plan_has_them_too(self):
        executor = Asked({}, env={"A": "1"}, max_restarts=2)
        executor.plan(1, "m:f", env={"B": "2"})
        assert (executor.asked.env, executor.asked.max_restarts) == ({"A": "1", "B": "2"}, 2)

    def test_what_the_caller_keeps_is_not_what_the_executor_has(self):
        given = {"A": "1"}
        executor = Asked({}, env=given)
        given["A"] = "2"
        executor.plan(1, "m:f", env=None)
        assert executor.asked.env == {"A": "1"}

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"env": {"REPLICA_WORLD_SIZE": "1"}}, "env may not set REPLICA_WORLD_SIZE"),
            ({"env": {"A": 1}}, "env must map text to text"),
            ({"env": ["A"]}, "env must be a mapping"),
            ({"max_restarts": -1}, "max_restarts must be a whole number from 0 to 1000, not -1"),
            ({"max_restarts": None}, "max_restarts must be a whole number from 0 to 1000"),
        ],
    )
    def test_they_are_checked_when_they_are_given(self, options, told):
        with pytest.raises(InvalidRequestError, match=told):
            Memory({}, **options)

    @pytest.mark.parametrize("env", [["A=1"], "A=1", 3])
    def test_a_launch_that_gives_something_else_is_told_so(self, env):
        executor = Memory({}, env={"A": "1"})
        with pytest.raises(InvalidRequestError, match="env must be a mapping of text to text, not"):
            executor.launch_replicas(1, "m:f", env=env)
        assert executor.hooks == []


def test_a_backend_may_refuse_a_launch_and_a_plan():
    executor = Asked({})
    for verb in (executor.launch_replicas, executor.plan):
        with pytest.raises(InvalidRequestError, match="cannot be had in memory"):
            verb(1, "m:f", spot=True)
    assert executor.hooks == []


@pytest.mark.parametrize(("run_id", "named"), [("mine", True), (None, False)])
def test_a_backend_is_told_whether_the_caller_named_the_run(run_id, named):
    executor = Asked({}, run_id="prefix")
    executor.launch_replicas(1, "m:f", run_id=run_id)
    assert executor.asked.named is named


def test_no_limit_may_be_written_as_a_number(executor):
    handles = executor.launch_replicas(1, "m:f")
    executor.world.update(dict.fromkeys(handles, DONE))
    (result,) = executor.collect(handles, timeout=float("inf"))
    assert result["status"] == "succeeded"


def test_a_plan_submits_nothing(executor):
    plan = executor.plan(2, "m:f", {"a": [1]}, run_id="mine")
    assert plan.run_id == "mine"
    assert [request["rank"] for request in plan.requests] == [0, 1]
    assert executor.hooks == []


def test_an_unknown_replica_is_an_exception(executor):
    with pytest.raises(ReplicaNotFoundError, match="no record of rank 7 of run 'gone'"):
        executor.poll(ReplicaHandle(7, "memory", run_id="gone", world_size=9))


def test_a_handle_of_another_backend_is_refused_by_every_verb(executor):
    foreign = ReplicaHandle(0, "eks", run_id="a")
    for verb in (
        executor.poll,
        executor.describe,
        executor.cancel,
        executor.purge,
        executor.stream_logs,
    ):
        with pytest.raises(InvalidRequestError, match="belongs to the backend 'eks'"):
            verb(foreign)
    with pytest.raises(InvalidRequestError, match="belongs to the backend 'eks'"):
        executor.log_iter(foreign)
    with pytest.raises(InvalidRequestError, match="belongs to the backend 'eks'"):
        executor.collect([foreign])
    assert executor.hooks == []


@pytest.mark.parametrize("name", ["", "..", "../a", "a/b", "A", "a\0", "x" * 5000])
def test_a_handle_of_a_run_that_no_launch_could_make_is_refused_by_every_verb(executor, name):
    forged = ReplicaHandle(0, "memory", run_id=name)
    for call in (
        lambda: executor.poll(forged),
        lambda: executor.describe(forged),
        lambda: executor.collect([forged]),
        lambda: executor.stream_logs(forged),
        lambda: executor.log_iter(forged),
        lambda: executor.cancel(forged),
        lambda: executor.purge(forged),
    ):
        with pytest.raises(
            InvalidRequestError, match="no launch gives a run such a name"
        ) as caught:
            call()
        assert len(str(caught.value)) < 300
    assert executor.hooks == []


@pytest.mark.parametrize("wrong", [None, "a", 7, {"rank": 0}])
def test_what_is_no_handle_is_refused_by_every_verb(executor, wrong):
    verbs = [executor.poll, executor.describe, executor.cancel, executor.purge]
    verbs += [executor.stream_logs, executor.log_iter, lambda one: executor.collect([one])]
    for verb in verbs:
        with pytest.raises(InvalidRequestError, match=r"not a ReplicaHandle: .*from_dict"):
            verb(wrong)
    assert executor.hooks == []


def test_collect_warns_once_of_a_failure_that_leaves_others_running(executor, caplog):
    handles = executor.launch_replicas(2, "m:f", {}, run_id="run-1")
    executor.world[handles[1]] = ReplicaStatus(ReplicaState.FAILED, message="killed")
    for _ in range(3):
        executor.collect(handles, timeout=0)
    assert caplog.text.count("rank 1 of run 'run-1' has failed for good: killed") == 1


def test_a_gang_ends_together_without_a_warning(executor, caplog):
    executor.capabilities = replace(executor.capabilities, failure_scope="gang")
    handles = executor.launch_replicas(2, "m:f", {}, run_id="run-1")
    executor.world[handles[1]] = ReplicaStatus(ReplicaState.FAILED, message="killed")
    executor.collect(handles, timeout=0)
    assert not caplog.records


def test_collect_takes_any_number_of_handles_from_anything_that_gives_them(executor):
    handles = executor.launch_replicas(2, "m:f")
    executor.world.update(dict.fromkeys(handles, DONE))
    results = executor.collect(handle for handle in handles)
    assert [result["rank"] for result in results] == [0, 1]
    with pytest.raises(InvalidRequestError, match="collect takes a list of handles, not Repl"):
        executor.collect(handles[0])


def test_an_unknown_log_stream_is_a_value_error(executor):
    (handle,) = executor.launch_replicas(1, "m:f")
    with pytest.raises(ValueError, match="no log stream 'stderr'; it has stdout"):
        executor.log_iter(handle, streams="stderr")
    assert list(executor.log_iter(handle, streams="stdout"))[:1] == ["line 0"]
    for n_lines in (0, -1, 1.5):
        with pytest.raises(InvalidRequestError, match="n_lines"):
            executor.stream_logs(handle, n_lines=n_lines)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "60"])
def test_a_wrong_time_limit_is_refused(executor, timeout):
    with pytest.raises(InvalidRequestError, match="timeout"):
        executor.collect([], timeout=timeout)


@pytest.mark.parametrize(
    "query", [{"regex": "("}, {"regex": b"x"}, {"regex": 5}, {"since": "today"}, {"until": True}]
)
def test_a_wrong_question_to_the_log_is_refused(executor, query):
    (handle,) = executor.launch_replicas(1, "m:f")
    with pytest.raises(InvalidRequestError, match=next(iter(query))):
        executor.log_iter(handle, streams="stdout", **query)


@pytest.mark.parametrize(
    ("given", "asked"),
    [(-1e300, 0.0), (5, 5), (1e17, 253_402_214_400.0), (1e300, 253_402_214_400.0), (None, None)],
)
def test_a_time_that_no_calendar_has_is_the_next_that_it_has(executor, given, asked):
    queries = []
    executor._logs = lambda handle, query: iter(queries.append(query) or [])
    (handle,) = executor.launch_replicas(1, "m:f")
    executor.log_iter(handle, streams="stdout", since=given, until=given)
    assert (queries[0].since, queries[0].until) == (asked, asked)
    if asked is not None:
        for hours in (-14, 14):
            datetime.fromtimestamp(asked, timezone(timedelta(hours=hours)))


def test_what_cannot_be_called_is_refused_before_anything_is_asked(executor):
    handles = executor.launch_replicas(1, "m:f")
    with pytest.raises(InvalidRequestError, match="progress must be a function, not 5"):
        executor.collect(handles, progress=5, timeout=0)


def test_a_timeout_that_the_backend_cannot_give_is_refused(executor):
    executor.capabilities = Capabilities(cancel_scope="replica", max_timeout=100)
    for timeout in (101, None):
        with pytest.raises(InvalidRequestError, match="at most 100 s"):
            executor.launch_replicas(1, "m:f", timeout=timeout)
    assert executor.launch_replicas(1, "m:f", timeout=100)


def test_the_longest_timeout_is_told_to_the_second(executor):
    executor.capabilities = Capabilities(cancel_scope="replica", max_timeout=2_417_390)
    with pytest.raises(InvalidRequestError, match="at most 2417390 s"):
        executor.launch_replicas(1, "m:f", timeout=None)


def test_an_argument_that_no_launch_has(executor):
    for ask in (lambda: executor.plan(1, "m:f", gpus=2), lambda: executor.check(1, gpus=2)):
        with pytest.raises(
            TypeError, match="a launch has no argument 'gpus'; it takes gpu, timeout"
        ):
            ask()


def test_the_plan_of_a_named_run_is_what_is_sent(executor):
    sent = []
    executor._submit = lambda request: sent.append(executor._plan(request)) or []
    arguments = (2, "m:f", {"a": [1]})
    options = {"run_id": "mine", "env": {"A": "1"}, "timeout": 60}
    plan = executor.plan(*arguments, **options)
    executor.launch_replicas(*arguments, **options)
    assert [list(plan.requests)] == sent


class TestExists:
    def test_the_backend_answers_and_not_the_journal(self, tmp_path):
        executor = Memory({}, journal=FolderJournal(tmp_path))
        executor.launch_replicas(2, "m:f", run_id="mine")
        assert executor.exists("mine") is True
        assert executor.exists("min") is False
        executor.world.clear()
        assert executor.exists("mine") is False
        assert executor.attach("mine")

    def test_a_fault_is_not_an_answer(self, executor):
        executor._attach = lambda run_id: unavailable()
        with pytest.raises(UnavailableError):
            executor.exists("mine")

    def test_a_name_that_no_run_has_is_not_sent_to_the_backend(self, executor):
        executor._attach = lambda run_id: unavailable()
        assert not any(executor.exists(name) for name in ("../mine", "Mine", "a/b"))
        with pytest.raises(InvalidRequestError, match="run_id must be non-empty text"):
            executor.exists(3)


class TestCheck:
    def test_nothing_is_found_where_nothing_is_looked_at(self, executor):
        assert executor.check() == executor.check(3, timeout=60) == []
        assert executor.hooks == []

    def test_a_backend_looks_at_the_launch_that_is_meant(self, executor):
        def findings(request):
            return [Finding("room", len(request.ranks) < 3, f"{request.cpu} CPU of each")]

        executor._findings = findings
        assert executor.check(2, cpu="4") == [Finding("room", True, "4 CPU of each")]
        assert executor.check(3)[0].ok is False

    def test_a_launch_that_would_be_refused_is_refused_here_too(self):
        executor = Asked({})
        with pytest.raises(InvalidRequestError, match="cannot be had in memory"):
            executor.check(2, spot=True)
        with pytest.raises(InvalidRequestError, match="n_replicas"):
            executor.check(0)


def test_closing_twice(executor):
    with executor as same:
        assert same is executor
    executor.close()


def test_a_prefix_is_not_an_idempotency_key():
    executor = Memory({}, run_id="nightly")
    first, second = executor.launch_replicas(1, "m:f"), executor.launch_replicas(1, "m:f")
    assert first != second
    assert first[0].run_id.startswith("nightly-")


def test_a_plan_shows_references_to_secrets_and_no_other_secrets():
    class Referring(Memory):
        def _plan(self, request):
            return [{"secrets": dict(request.secrets), "env": dict(request.env)}]

    options = {"secrets": {"API_KEY": "store/key", "DB": "s3://u:pw@b"}, "env": {"DB_PASS": "x1"}}
    (request,) = Referring({}).plan(1, "m:f", run_id="a", **options).requests
    assert request == {
        "secrets": {"API_KEY": "store/key", "DB": "s3://<redacted>@b"},
        "env": {"DB_PASS": "<redacted>"},
    }
