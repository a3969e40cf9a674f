"""A rendezvous is tried by a replica, and what that says is a stranger's word."""

import pytest
from memory_lab import DONE, Memory

from diloco_protocol import Finding, ResultLostError
from diloco_protocol.backend import try_rendezvous


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


def test_a_finding_shows_what_others_have_written_as_a_message_does():
    warned = Finding("manifest", None, f"\x1b[2J https://u:hunter2Zq@h {'x' * 50_000}")
    assert warned.message.startswith("\\x1b[2J https://<redacted>@h x")
    assert len(warned.message) < 17_000
