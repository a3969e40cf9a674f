"""Verbs try again while errors may pass, and `check` has a replica try a rendezvous."""

import pytest
from memory_lab import DONE, Memory

from diloco_protocol import BackendError, Backoff, Finding, UnavailableError
from diloco_protocol.backend import Options

HOOKS = {
    "describe": "_observe_run",
    "poll": "_observe_run",
    "describe_run": "_observe_run",
    "stream_logs": "_logs",
    "log_iter": "_logs",
    "purge": "_purge",
    "meets_at": "_rendezvous",
    "list_runs": "_list_runs",
    "attach": "_attach",
    "exists": "_attach",
}


def call(executor, verb, handle):
    run_id = handle.run_id
    given = {"list_runs": (), "attach": (run_id,), "exists": (run_id,), "describe_run": ([handle],)}
    more = {"streams": "stdout"} if verb == "log_iter" else {}
    return getattr(executor, verb)(*given.get(verb, (handle,)), **more)


@pytest.mark.parametrize(("verb", "hook"), HOOKS.items())
def test_a_verb_tries_again_for_as_long_as_it_is_told(verb, hook, monkeypatch):
    executor = Memory({}, patience=10.0)
    (handle,) = executor.launch_replicas(1, "m:f", {})
    expected = call(Memory(dict(executor.world)), verb, handle)
    failures = [UnavailableError("no answer"), UnavailableError("no answer")]
    works = getattr(executor, hook)

    def fails(*given):
        if failures:
            raise failures.pop()
        return works(*given)

    monkeypatch.setattr(executor, hook, fails)
    found = call(executor, verb, handle)
    assert list(found) == list(expected) if verb == "log_iter" else found == expected
    failures += [BackendError("refused")]
    with pytest.raises(BackendError, match="refused"):
        call(executor, verb, handle)
    assert not failures
    executor._patience = 0.0
    failures += [UnavailableError("no answer")] * 2
    with pytest.raises(UnavailableError):
        call(executor, verb, handle)
    assert len(failures) == 1


def test_a_log_that_is_read_line_by_line_is_read_again():
    failures = [UnavailableError("no answer"), UnavailableError("no answer")]

    class Reads(Memory):
        def _logs(self, handle, query):
            yield "first"
            if failures:
                raise failures.pop()
            yield "last"

    executor = Reads({}, patience=10.0)
    (handle,) = executor.launch_replicas(1, "m:f", {})
    assert executor.stream_logs(handle) == "first\nlast"
    assert not failures


class Probed(Memory):
    """Its replicas have used the rendezvous at once, and cost a finding of their own."""

    replica_word = "cell"
    launched = ()

    def launch_replicas(self, *arguments, **options):
        self.launched = (*self.launched, options)
        handles = super().launch_replicas(*arguments, **options)
        self.world.update(dict.fromkeys(handles, DONE))
        return handles

    def _result(self, handle):
        return {"seconds": 0.5, "exclusive": True}

    def _findings(self, request):
        return [Finding("memory", self.good, "looked at"), Finding("place", None, "not known")]

    def _seen_by_probe(self):
        return [Finding("place", True, "it ran there")]

    good = True


def test_a_replica_tries_the_rendezvous_and_says_what_was_not_known():
    executor = Probed({})
    assert [finding.subject for finding in executor.check()] == ["memory", "place"]
    assert not executor.launched
    options = {"env": {"A": "1"}, "gpu": "any:8", "timeout": 5.0}
    memory, place, rendezvous = executor.check(4, rendezvous_uri="s3://bucket/run", **options)
    assert (memory.subject, place, rendezvous.ok) == (
        "memory",
        Finding("place", True, "it ran there"),
        True,
    )
    assert rendezvous.message.startswith("a cell wrote and read s3://bucket/run")
    (asked,) = executor.launched
    assert (asked["env"], asked["timeout"], asked.get("gpu")) == ({"A": "1"}, 600.0, None)
    assert not executor.world, "the replica was removed"


def test_no_replica_is_started_where_the_launch_would_fail():
    executor = Probed({})
    executor.good = False
    findings = executor.check(rendezvous_uri="s3://bucket/run")
    assert [finding.subject for finding in findings] == ["memory", "place"]
    assert not executor.launched


def test_options_go_to_the_base_class():
    class Chosen(Options):
        pass

    backoff = Backoff(first=3.0)
    assert Chosen().of_base(backoff) == {"backoff": backoff}
    assert Memory.options() == []
