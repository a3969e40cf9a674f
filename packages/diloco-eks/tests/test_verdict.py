"""How a pod ended, from its own evidence."""

import pytest

from diloco_eks._state._reading import read_pod
from diloco_eks._state._verdict import judge, read_message
from diloco_protocol import Outcome, Reason, outcome_to_message


def failed(a_pod, terminated=None, **values):
    return read_pod(
        a_pod(0, "Failed", {"terminated": terminated} if terminated else None, **values)
    )


def report(**values):
    return outcome_to_message(Outcome(**values))[0]


def test_the_runners_report_is_believed(a_pod):
    text = report(
        exit_code=137, signal="SIGKILL", error="rank 3 was ended by SIGKILL", traceback="x" * 9000
    )
    end = {"exitCode": 137, "reason": "Error", "message": text}
    end |= {"startedAt": "2026-11-21T04:30:48Z", "finishedAt": "2026-11-21T04:31:48.5Z"}
    verdict = judge(failed(a_pod, end))
    assert (verdict.reason, verdict.exit_code, verdict.signal) == (Reason.ERROR, 137, "SIGKILL")
    assert verdict.message == "rank 3 was ended by SIGKILL"
    assert verdict.finished_at - verdict.started_at == 60.5


@pytest.mark.parametrize(
    ("terminated", "reason", "exit_code", "signal"),
    [
        ({"exitCode": 137, "reason": "OOMKilled"}, Reason.OOM, 137, "SIGKILL"),
        (
            {"exitCode": 128, "reason": "StartError", "message": "no such file"},
            Reason.START_FAILED,
            128,
            None,
        ),
        (
            {"exitCode": 2, "message": report(exit_code=2, error="v9", reason=Reason.START_FAILED)},
            Reason.START_FAILED,
            2,
            None,
        ),
        (
            {
                "exitCode": 124,
                "message": report(exit_code=124, error="too long", reason=Reason.TIMEOUT),
            },
            Reason.TIMEOUT,
            124,
            None,
        ),
        (
            {"exitCode": 143, "message": report(exit_code=143, reason=Reason.CANCEL_REQUESTED)},
            Reason.ERROR,
            143,
            None,
        ),
        ({"exitCode": 127}, Reason.ERROR, 127, None),
        ({"exitCode": 139}, Reason.ERROR, 139, "SIGSEGV"),
        ({"exitCode": 1, "signal": 9}, Reason.ERROR, 1, "SIGKILL"),
        ({"exitCode": 255}, Reason.ERROR, 255, None),
    ],
)
def test_reasons(a_pod, terminated, reason, exit_code, signal):
    verdict = judge(failed(a_pod, terminated))
    assert (verdict.reason, verdict.exit_code, verdict.signal) == (reason, exit_code, signal)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"reason": "Evicted", "message": "The node was low on resource: memory."}, Reason.EVICTED),
        ({"reason": "DeadlineExceeded"}, Reason.TIMEOUT),
        ({"reason": "UnexpectedAdmissionError", "message": "no GPU"}, Reason.PLATFORM),
        ({"conditions": [{"type": "DisruptionTarget", "status": "True"}]}, Reason.EVICTED),
        ({}, Reason.PLATFORM),
    ],
)
def test_pods_that_failed_as_a_whole(a_pod, values, reason):
    for terminated in (None, {"exitCode": 137}):
        if terminated and reason is Reason.PLATFORM:
            continue
        verdict = judge(failed(a_pod, terminated, **values))
        assert verdict.reason is reason
        assert verdict.message
    assert values.get("message", "") in verdict.message


def test_the_end_of_the_log_is_shown_where_there_is_no_report(a_pod):
    pod = failed(
        a_pod, {"exitCode": 1, "message": "Traceback …\nImportError: no module named trainer\n"}
    )
    assert read_message(pod) is None
    assert judge(pod).message.endswith("ImportError: no module named trainer")


@pytest.mark.parametrize("shown", range(470, 510, 5))
def test_no_half_of_a_secret_is_left_where_a_log_is_cut(a_pod, shown):
    """The name that tells that it is one may be what is cut off."""
    log = "DB_PASSWORD=hunter2hunter2hunter2 " + "x" * (shown - 34)
    for reason in ("Error", "StartError"):
        end = {"exitCode": 1, "reason": reason, "message": log}
        assert "hunter2" not in judge(failed(a_pod, end)).message


def test_a_reason_of_another_type_is_none(a_pod):
    end = {"exitCode": 1, "reason": ["OOMKilled"], "signal": [9], "message": {}}
    assert judge(failed(a_pod, end)).message == "it exited with code 1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        None,
        3,
        "[]",
        "{}",
        '{"version": 9}',
        '{"outcome": 3, "result_lines": 0, "result_sha256": ""}',
    ],
)
def test_other_messages_are_no_report(a_pod, text):
    assert read_message(failed(a_pod, {"exitCode": 1, "message": text})) is None
