"""A rendezvous is tried by a replica, and what that says is a stranger's word."""

import pytest
from memory_lab import DONE, Asked, Memory

from diloco_protocol import (
    BackendError,
    Finding,
    InvalidRequestError,
    LaunchError,
    ReplicaState,
    ReplicaStatus,
    ResultLostError,
)
from diloco_protocol._rendezvous import try_rendezvous


class Probe(Memory):
    """Its replica has ended at once, with what the test says."""

    def _submit(self, request):
        handles = super()._submit(request)
        self.world.update(dict.fromkeys(handles, DONE))
        return handles

    def _result(self, handle):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def tried(found):
    executor = Probe({})
    executor.found = found
    findings = try_rendezvous(executor, "s3://bucket/run", 10.0, {}, "pod")
    assert not executor.world, "the replica was removed"
    (finding,) = findings
    assert finding.subject == "rendezvous"
    return finding


@pytest.mark.parametrize(
    ("exclusive", "words"),
    [(True, "conditional writes included"), (False, "only runs with fixed membership")],
)
def test_what_a_replica_has_found(exclusive, words):
    finding = tried({"seconds": 0.5, "exclusive": exclusive})
    assert finding.ok is True
    assert "a pod wrote and read s3://bucket/run in 0.5 s" in finding.message
    assert words in finding.message


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (ResultLostError("the disk is gone"), "the disk is gone"),
        (None, "its result is not that of the probe"),
        ({"seconds": 1}, "its result is not that of the probe"),
        ({"seconds": "\x1b[2J", "exclusive": True}, "its result is not that of the probe"),
        ({"seconds": True, "exclusive": True}, "its result is not that of the probe"),
        ({"seconds": 1, "exclusive": "yes"}, "its result is not that of the probe"),
        ([1], "its result is not that of the probe"),
    ],
)
def test_a_success_without_its_result_is_a_finding(found, words):
    finding = tried(found)
    assert finding.ok is None
    assert "what it found out is not known" in finding.message
    assert words in finding.message


def test_a_replica_that_cannot_use_it_is_not_started_again():
    executor = Asked({}, max_restarts=6)
    try_rendezvous(executor, "s3://bucket/run", 0.01, {}, "pod")
    assert executor.asked.max_restarts == 0


@pytest.mark.parametrize(
    ("uri", "patience", "words"),
    [
        *[(uri, 10.0, "rendezvous_uri must be text") for uri in (5, True, b"s3://b", ["s3://b"])],
        *[(uri, 10.0, "rendezvous_uri must be text") for uri in ("", "s3://b/\0", "s3://b/\ud800")],
        *[("s3://b", number, "patience must be") for number in ("x", 0, -1, float("nan"), True)],
    ],
)
def test_what_cannot_be_tried_is_refused_at_once(uri, patience, words):
    executor = Probe({})
    with pytest.raises(InvalidRequestError, match=words):
        try_rendezvous(executor, uri, patience, {}, "pod")
    assert executor.hooks == []


def test_a_finding_shows_what_others_have_written_as_a_message_does():
    warned = Finding("manifest", None, f"\x1b[2J https://u:hunter2Zq@h {'x' * 50_000}")
    assert warned.message.startswith("\\x1b[2J https://<redacted>@h x")
    assert len(warned.message) < 17_000


class Survived(Probe):
    """Its launch has failed when the replica ran."""

    def _submit(self, request):
        handles = super()._submit(request)
        self.world.update(dict.fromkeys(handles, ReplicaStatus(ReplicaState.RUNNING)))
        raise LaunchError("it could not be written down", handles)

    def _stop(self, handle):
        if self.refuses:
            raise BackendError("not today")
        super()._stop(handle)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_launch_that_failed_leaves_no_replica_or_names_it(refuses):
    executor = Survived({})
    executor.refuses = refuses
    findings = try_rendezvous(executor, "s3://bucket/run", 0.01, {}, "pod")
    assert findings[0].ok is False
    assert "could not be launched: it could not be written down" in findings[0].message
    assert len(executor.world) == refuses
    assert [each.subject for each in findings[1:]] == ["cleanup"] * refuses
    for handle in executor.world:
        assert f"end it with cancel_run({handle.run_id!r}). not today" in findings[1].message
