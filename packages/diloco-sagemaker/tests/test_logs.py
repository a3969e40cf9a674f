"""Logs: whose lines they are, until when they come, and what a log without an end may cost."""

import itertools
import tracemalloc

import pytest

from diloco_protocol import (
    BackendError,
    ForbiddenError,
    ReplicaNotFoundError,
    UnavailableError,
)
from diloco_sagemaker._client._errors import MissingError


@pytest.fixture
def handle(aws, executor):
    (handle,) = executor().launch_replicas(1, "trainer:train", {"a": 1}, run_id="run-1")
    return handle


def name(handle):
    return handle.metadata["job_name"]


def write(aws, handle, *lines):
    """A stream of the job, or more lines of it."""
    stream = aws.logs.setdefault(
        f"{name(handle)}/algo-1-{int(aws.jobs[name(handle)]['CreationTime'])}", []
    )
    stream += [(int(aws.now * 1000), line) for line in lines]


def test_a_follower_of_a_run_that_is_purged_ends(aws, executor, handle):
    write(aws, handle, "works")
    lines = executor().log_iter(handle, follow=True)
    assert next(lines) == "works"
    aws.move(name(handle), "Completed", "Completed")
    executor().purge(handle)
    assert list(lines) == []


@pytest.mark.parametrize("options", [{}, {"follow": True}])
def test_lines_of_a_later_job_of_the_name_are_not_given(aws, executor, handle, options):
    write(aws, handle, "works")
    lines = executor().log_iter(handle, **options)
    aws.move(name(handle), "Completed", "Completed")
    executor().purge(handle)
    aws.sleep(1)
    (other,) = executor().launch_replicas(1, "trainer:train", {"a": 2}, run_id="run-1")
    write(aws, other, "works for another launch")
    aws.move(name(handle), "Completed", "Completed")
    if options:
        assert list(lines) == []
    else:  # an empty log would say that it wrote nothing
        with pytest.raises(ReplicaNotFoundError):
            list(lines)
    assert list(executor().log_iter(other)) == ["works for another launch"]


def test_a_log_that_is_deleted_while_it_is_read_is_no_empty_log(executor, handle, aws, monkeypatch):
    write(aws, handle, "works")

    def deleted(*_, **__):
        raise MissingError("there is no such stream")

    made = executor()
    monkeypatch.setattr(made._client, "log_events", deleted)
    with pytest.raises(ReplicaNotFoundError):
        made.stream_logs(handle)


@pytest.mark.parametrize(("late", "options"), [(12, {}), (25, {"log_delay": 30})])
def test_lines_that_come_after_the_end_are_followed(aws, executor, handle, late, options):
    write(aws, handle, "works")
    aws.move(name(handle), "Completed", "Completed")
    ended, sleep, last = aws.now, aws.sleep, ["the last words"]

    def sleeping(seconds):
        sleep(seconds)
        if last and aws.now >= ended + late:
            write(aws, handle, last.pop())

    ours = executor(**options)
    object.__setattr__(ours._backoff, "sleep", sleeping)
    assert list(ours.log_iter(handle, follow=True)) == ["works", "the last words"]
    assert aws.now < ended + 80  # it does not wait for ever


@pytest.mark.sampled
@pytest.mark.parametrize("call", ["DescribeTrainingJob", "DescribeLogStreams", "GetLogEvents"])
def test_who_may_not_read_a_log_is_told(aws, executor, handle, call):
    write(aws, handle, "works")
    aws.faults.append((call, "AccessDeniedException", "no", 400, False))
    with pytest.raises(ForbiddenError, match="AccessDeniedException"):
        executor().stream_logs(handle)


READINGS = {
    "follow": lambda ours, handle: list(ours.log_iter(handle, follow=True)),
    "all": lambda ours, handle: list(ours.log_iter(handle)),
    "tail": lambda ours, handle: ours.stream_logs(handle, n_lines=1000),
}


@pytest.mark.sampled
@pytest.mark.parametrize("reading", READINGS)
def test_a_line_that_looks_like_a_piece_of_a_result_is_the_replicas(aws, executor, handle, reading):
    lines = ["before", "diloco-result of step 3", "diloco-result 0123456789abcdef 3 {}", "after"]
    write(aws, handle, *lines)
    aws.move(name(handle), "Completed", "Completed")
    read = READINGS[reading](executor(), handle)
    assert (read.splitlines() if reading == "tail" else read) == lines


@pytest.mark.sampled
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("events", [[], [{"timestamp": 1, "message": "x"}]], ids=["empty", "full"])
@pytest.mark.parametrize("circle", [1, 2, 5, None], ids=str)
def test_pages_that_have_no_end_are_an_error(
    aws, executor, handle, monkeypatch, reading, events, circle
):
    if (bool(events), circle) in {(True, None), (False, 1)}:
        return  # that is a long log, and the end of one
    monkeypatch.setattr("diloco_sagemaker._verbs._logs._MOST_EMPTY", 20, raising=False)
    write(aws, handle, "works")
    aws.move(name(handle), "Completed", "Completed")
    tokens = itertools.cycle(range(circle)) if circle else itertools.count()

    def page(body):
        token = "end" if aws.count("GetLogEvents") > 100 else str(next(tokens))
        return {"events": events, "nextForwardToken": token, "nextBackwardToken": token}

    aws.GetLogEvents = page
    with pytest.raises(UnavailableError, match="its pages have no end"):
        READINGS[reading](executor(retry_timeout=0), handle)
    assert aws.count("GetLogEvents") < 50


def test_of_a_page_the_lines_are_kept_that_are_asked_for(aws, executor, handle):
    write(aws, handle, "before", "ab\n" * 100_000 + "the last")
    ours = executor()
    ours.poll(handle)  # its clients are made
    tracemalloc.start()
    try:
        assert ours.stream_logs(handle, n_lines=2).splitlines() == ["ab", "the last"]
        assert tracemalloc.get_traced_memory()[1] < 7_000_000  # as a list they take 6 MB more
    finally:
        tracemalloc.stop()


def test_a_list_of_streams_is_not_kept_whole(aws, executor, handle, monkeypatch):
    aws.move(name(handle), "Completed", "Completed")
    numbers = itertools.count()

    def streams(body):
        number = next(numbers)
        created = int(aws.now * 1000) if number % 2 else 0  # half of them are older than the job
        answer = [
            {"logStreamName": f"{name(handle)}/{number}-{each}", "creationTime": created}
            for each in range(20)
        ]
        return {"logStreams": answer, **({"nextToken": str(number)} if number < 30 else {})}

    aws.DescribeLogStreams = streams
    monkeypatch.setattr("diloco_sagemaker._verbs._logs.MOST_STREAMS", 50, raising=False)
    for read in READINGS.values():
        with pytest.raises(BackendError, match=r"more than 50 log streams. The log is at https"):
            read(executor(), handle)
    assert aws.count("DescribeLogStreams") == 3 * 6


def test_a_stream_with_a_name_that_can_be_none_is_refused(aws, executor, handle):
    aws.logs[f"{name(handle)}/{'x' * 600}"] = []
    with pytest.raises(UnavailableError, match="not AWS's own"):
        executor(retry_timeout=2).stream_logs(handle)


def test_a_purge_deletes_all_streams_a_part_at_a_time(aws, executor, handle, monkeypatch):
    monkeypatch.setattr("diloco_sagemaker._verbs._purge.MOST_STREAMS", 10, raising=False)
    for number in range(25):
        aws.logs[f"{name(handle)}/algo-1-{number}"] = []
    aws.logs["others/algo-1"] = []
    aws.move(name(handle), "Completed", "Completed")
    executor().purge(handle)
    assert list(aws.logs) == ["others/algo-1"]
    assert aws.jobs == {}
