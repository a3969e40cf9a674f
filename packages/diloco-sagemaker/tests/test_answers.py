"""Answers that are not AWS's, or only half of one, say nothing of jobs and results."""

import contextlib
import time
import tracemalloc

import pytest
from bad_network import BadNetwork

from diloco_protocol import (
    Backoff,
    FolderJournal,
    ForbiddenError,
    InvalidRequestError,
    Outcome,
    Reason,
    ThrottledError,
    UnavailableError,
)


class Always(BadNetwork):
    """One thing happens to all requests of a kind."""

    kind, always = "", None

    def fate(self, what):
        return self.always if what.startswith(self.kind) else None


@pytest.fixture
def network(aws):
    made = Always(aws.url)
    try:
        yield made
    finally:
        made.close()


def launch(executor):
    return executor.launch_replicas(1, "trainer:train", run_id="run-1")


@pytest.mark.parametrize("kind", ["ListTrainingJobs", "DescribeTrainingJob"])
def test_half_an_answer_is_not_an_empty_one(executor, network, kind):
    handles = launch(executor())
    shaken = executor(endpoint_url=network.url, retry_timeout=5)
    network.kind, network.always = kind, "cut"
    with pytest.raises(UnavailableError, match=r"Unable to parse|not AWS's own, or was cut"):
        shaken.attach("run-1")
    network.always = None
    assert shaken.attach("run-1") == handles


@pytest.mark.parametrize("words", ["<html>Not Found</html>", ""])
def test_a_404_that_is_not_of_s3_loses_no_result(aws, executor, monkeypatch, words):
    (handle,) = launch(executor())
    name = handle.metadata["job_name"]
    aws.move(name, "InProgress", "Training")
    aws.move(name, "Completed", "Completed")
    handler = aws.server.RequestHandlerClass

    def not_found(self):
        self._send(404, words.encode(), "text/html")

    with monkeypatch.context() as patch:
        patch.setattr(handler, "do_GET", not_found)
        with pytest.raises(UnavailableError, match="not AWS's own"):
            executor(retry_timeout=5).collect([handle], timeout=30)
    aws.objects[f"/bucket/runs/{name}/output/model/diloco-outcome.json"] = (
        Outcome(0, result="here").to_json().encode()
    )
    (result,) = executor().collect([handle], timeout=30)
    assert result["result"] == "here"


_JSON, _PAGE = "application/x-amz-json-1.1", "text/html"
_ID = (
    ("x-amzn-RequestId", "id"),
    ("x-amz-request-id", "id"),
    ("Last-Modified", "Thu, 26 Nov 2026 20:00:00 GMT"),
)
_HTML = b"<!doctype html><title>Log in</title><p>Log in"
OF_A_PROXY = {
    "an object": (200, _JSON, b"{}"),
    "nothing": (200, _PAGE, b""),
    "no content": (204, _PAGE, b""),
    "a page": (200, _PAGE, _HTML),
    "a page in XML": (200, _PAGE, b"<html><body>Log in</body></html>"),
    "a list": (200, _JSON, b"[]"),
    "null": (200, _JSON, b"null"),
    "not found": (404, _PAGE, _HTML),
    "not found, in JSON": (404, _JSON, b'{"message": "no such route"}'),
    "forbidden": (403, _PAGE, b"<html><body>Forbidden</body></html>"),
    "bad": (400, _JSON, b'{"message": "bad request"}'),
    "words of AWS, and no id": (
        400, _JSON,
        b'{"__type": "ResourceNotFound", "message": "Requested resource not found."}',
    ),
    "a refusal of AWS, and no id": (
        403, _JSON, b'{"__type": "AccessDeniedException", "message": "no"}',
    ),
    "a refusal of its own": (403, _JSON, b'{"__type": "ProxyDenied", "message": "no"}'),
    "as of S3": (404, "application/xml",
                 b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>"),
    "as if it had ended": (
        400, _JSON,
        b'{"__type": "ValidationException", "message": "The request was rejected because the '
        b'training job is in status Stopped."}',
    ),
    "a list with 404": (404, _JSON, b"[]"),
    "a number for a code": (400, _JSON, b'{"__type": 5}'),
    "a text for an error": (404, "application/xml", b"<answer><Error>none</Error></answer>"),
    "a redirect": (302, _PAGE, _HTML, (("Location", "http://127.0.0.1:1/login"),)),
}  # fmt: skip
OF_A_GATEWAY = {  # of AWS as well, so that it has ids
    "an object": (200, _JSON, b"{}", _ID),
    "null": (200, _JSON, b'{"TrainingJobSummaries": null, "TrainingJobName": null, "events": null}',
             _ID),
    "other types": (
        200, _JSON,
        b'{"TrainingJobSummaries": [5], "TrainingJobName": 5, "TrainingJobArn": [], "Tags": [null],'
        b' "logStreams": {"a": 1}, "events": [{"message": 5}]}', _ID,
    ),
    "no times": (
        200, _JSON,
        b'{"TrainingJobSummaries": [{"TrainingJobName": "a", "CreationTime": 1e300}], '
        b'"TrainingJobArn": "a", "logStreams": [{"logStreamName": "a", "creationTime": 1e5}], '
        b'"TrainingJobName": "a", "CreationTime": "soon"}', _ID,
    ),
    "of another job": (
        200, _JSON,
        b'{"TrainingJobName": "diloco-run-1-00007", "TrainingJobArn": "a", '
        b'"TrainingJobStatus": "Completed", "CreationTime": 1750000000}', _ID,
    ),
}  # fmt: skip
ASKED = {  # what for, and how the job stands then
    "POST sts": ("launch", "running"),
    "ListTrainingJobs": ("list_runs exists attach cancel_run", "running"),
    "DescribeTrainingJob": ("describe collect attach cancel purge stream_logs", "running"),
    "ListTags": ("describe", "stopped"),
    "StopTrainingJob": ("cancel", "running"),
    "DescribeLogStreams": ("stream_logs", "running"),
    "GetLogEvents": ("stream_logs", "running"),
    "GET /bucket/runs": ("collect", "ended"),
    "DeleteTrainingJob": ("purge", "ended"),
    "DeleteLogStream": ("purge", "ended"),
    "DELETE /bucket": ("purge", "ended"),
    "CreateTrainingJob": ("launch", "running"),
}


def ask(executor, verb, handle):
    if verb == "launch":
        return executor.launch_replicas(1, "trainer:train", run_id="run-2", timeout=60)
    if verb in {"exists", "attach", "cancel_run"}:
        return getattr(executor, verb)("run-1")
    if verb == "collect":
        return executor.collect([handle], timeout=30)
    return executor.list_runs() if verb == "list_runs" else getattr(executor, verb)(handle)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ASKED)
def test_what_a_proxy_says_is_not_the_word_of_aws(aws, executor, network, tmp_path, kind):
    (handle,) = launch(executor())
    name = handle.metadata["job_name"]
    verbs, state = ASKED[kind]
    aws.move(name, "InProgress", "Training")
    aws.logs[f"{name}/algo-1-1"] = [(int(aws.now * 1000), "works")]
    if state == "ended":
        aws.move(name, "Completed", "Completed")
        key = f"/bucket/runs/{name}/output/model/diloco-outcome.json"
        aws.objects[key] = Outcome(0, result="here").to_json().encode()
    elif state == "stopped":
        aws.move(name, "Stopped", "Stopped")
    journal = FolderJournal(tmp_path)
    shaken = executor(endpoint_url=network.url, retry_timeout=2, journal=journal)
    network.kind = kind
    answers = list(OF_A_PROXY.items())
    if not kind.startswith(("POST", "GET", "Stop", "Delete", "DELETE")):
        answers += OF_A_GATEWAY.items()  # the others have no more to tell than the id, or speak XML
    for word, network.always in answers:
        for verb in verbs.split():
            with pytest.raises(UnavailableError):
                pytest.fail(f"{verb}, {word}: {ask(shaken, verb, handle)!r}")
    network.always = None
    assert shaken.list_runs() == ["run-1"]
    if state == "running":
        assert shaken.describe(handle).state == "running"
        assert shaken.stream_logs(handle) == "works"
    elif state == "ended":
        assert shaken.collect([handle])[0]["result"] == "here"


def test_a_purge_with_a_journal_waits_out_what_passes(aws, executor, tmp_path):
    journal = FolderJournal(tmp_path)
    (handle,) = launch(executor(journal=journal))
    aws.move(handle.metadata["job_name"], "Stopped", "Stopped")
    ours = executor(journal=journal)
    for call in ("DescribeTrainingJob", "ListTrainingJobs"):
        aws.faults.append((call, "ThrottlingException", "Rate exceeded", 400, False))
    ours.purge(handle)
    assert journal.end(handle)[0].state == "cancelled"
    assert aws.jobs == {}


def test_a_word_that_nobody_knows_is_no_state(aws, executor):
    (handle,) = launch(executor())
    name = handle.metadata["job_name"]
    aws.move(name, "Dreaming", "Dreaming")
    with pytest.raises(UnavailableError, match="is 'Dreaming', and this version does not know"):
        executor(retry_timeout=2).describe(handle)


def test_a_log_with_half_a_character_is_read(aws, executor):
    (handle,) = launch(executor())
    name = handle.metadata["job_name"]
    aws.logs[f"{name}/algo-1-1"] = [(int(aws.now * 1000), "half \ud83d of it")]
    assert executor().stream_logs(handle) == "half ? of it"


def test_purge_deletes_nothing_that_it_did_not_ask_for(aws, executor, monkeypatch):
    """What an answer names is held against the prefix."""
    (handle,) = launch(executor(spot=True))
    name = handle.metadata["job_name"]
    aws.move(name, "InProgress", "Training")
    aws.move(name, "Completed", "Completed")
    aws.objects["/bucket/production/model.bin"] = b"x"
    ours = executor(spot=True, retry_timeout=2)
    streams = {"logStreams": [{"logStreamName": "others/algo-1", "creationTime": 1}]}
    with monkeypatch.context() as patch:
        patch.setattr(aws, "DescribeLogStreams", lambda body: streams)
        with pytest.raises(UnavailableError, match=r"'others/algo-1'.*not AWS's own"):
            ours.purge(handle)
    assert aws.count("DeleteLogStream") == 0
    key = b"<Contents><Key>production/model.bin</Key></Contents>"
    page = b"<ListBucketResult><IsTruncated>false</IsTruncated>" + key + b"</ListBucketResult>"
    handler = aws.server.RequestHandlerClass
    with monkeypatch.context() as patch:
        patch.setattr(handler, "do_GET", lambda self: self._send(200, page, "application/xml"))
        with pytest.raises(UnavailableError, match=r"'production/model\.bin'.*not AWS's own"):
            ours.purge(handle)
    assert "/bucket/production/model.bin" in aws.objects
    assert name in aws.jobs


def test_a_job_with_the_arn_of_another_is_not_tagged(aws, executor):
    (handle,) = launch(executor())
    name = handle.metadata["job_name"]
    aws.move(name, "InProgress", "Training")
    aws.jobs[name]["TrainingJobArn"] = "arn:aws:sagemaker:eu-west-1:123456789012:training-job/other"
    with pytest.raises(UnavailableError, match=r"about '.*job/other'"):
        executor(retry_timeout=2).cancel(handle)
    assert aws.count("AddTags") == 0


def test_one_rank_does_not_hide_the_others(aws, executor, monkeypatch):
    handles = executor().launch_replicas(3, "trainer:train", run_id="run-1", max_restarts=1)
    first, second, third = (handle.metadata["job_name"] for handle in handles)
    for name in (first, second, third):
        aws.move(name, "InProgress", "Training")
    aws.move(first, "Completed", "Completed")
    aws.move(second, "Archived", "Archived")
    refusal = b"<Error><Code>AccessDenied</Code><Message>not authorized</Message></Error>"
    handler = aws.server.RequestHandlerClass
    monkeypatch.setattr(handler, "do_GET", lambda self: self._send(403, refusal, "application/xml"))
    ours, seen = executor(retry_timeout=2), {}
    with pytest.raises(ForbiddenError, match="cannot read s3") as caught:
        ours.collect(handles, timeout=2, progress=seen.update)
    assert "1 of 3 handles" in caught.value.__notes__[-1]
    assert [seen[handle].state for handle in handles] == ["succeeded", "running", "running"]
    assert "'Archived'" in seen[handles[1]].message
    results = ours.collect(handles[1:], timeout=2)
    assert [result["status"] for result in results] == ["running", "running"]


def test_times_before_all_jobs_are_left_out(aws, executor, tmp_path):
    (handle,) = launch(executor())
    name = handle.metadata["job_name"]
    aws.move(name, "InProgress", "Training")
    times = dict.fromkeys(("TrainingStartTime", "TrainingEndTime"), -5.0)
    aws.move(name, "Failed", "Failed", **times)
    aws.jobs[name].update(
        LastModifiedTime=-1.0,
        SecondaryStatusTransitions=[{"Status": "Training", "StartTime": -9, "EndTime": -8}],
    )  # fmt: skip
    journal = FolderJournal(tmp_path / "journal")
    status = executor(journal=journal).describe(handle)
    assert (status.started_at, status.finished_at) == (None, None)
    assert journal.end(handle)[0].state == "failed"


class Endless:
    """A body that goes on for ever, fast or slowly."""

    def __init__(self, piece, pause):
        self.piece, self.pause = piece, pause

    def __call__(self, handler):
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.send_response(200)
        handler.send_header("x-amzn-RequestId", "id")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(self.piece)
                time.sleep(self.pause)


class EndlessHeaders(Endless):
    """Headers that go on for ever."""

    def __call__(self, handler):
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.close_connection = True
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Name: ")
            while True:
                handler.wfile.write(self.piece)
                time.sleep(self.pause)


@pytest.mark.parametrize(
    ("body", "options", "words"),
    [
        (Endless(b" " * 65536, 0), {}, "more than 67108864 bytes"),
        # On a busy machine, one pause may be as long as the limit of a single read.
        (Endless(b" ", 0.01), {"request_timeout": 0.3}, "comes too slowly|Read timed out"),
    ],
)
def test_an_answer_has_an_end(aws, executor, monkeypatch, body, options, words):
    (handle,) = launch(executor())
    ours = executor(retry_timeout=0, **options)
    monkeypatch.setattr(aws.server.RequestHandlerClass, "do_POST", lambda self: body(self))
    tracemalloc.start()
    try:
        with pytest.raises(UnavailableError, match=words):
            ours.describe(handle)
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


PATIENCE = 600.0  # seconds; each of these answers would take far longer


def real_time():
    return Backoff(first=0.1, cap=0.2)


def test_headers_have_an_end(aws, executor, monkeypatch):
    (handle,) = launch(executor())
    ours = executor(retry_timeout=0, request_timeout=0.1, backoff=real_time())
    drip = EndlessHeaders(b"a", 0.02)
    monkeypatch.setattr(aws.server.RequestHandlerClass, "do_POST", lambda self: drip(self))
    begin = time.monotonic()
    with pytest.raises(UnavailableError):
        ours.describe(handle)
    assert time.monotonic() - begin < PATIENCE


@pytest.mark.sampled
@pytest.mark.parametrize("drip", [EndlessHeaders(b"a", 0.02), Endless(b" ", 0.02)])
@pytest.mark.parametrize("verb", ["do_POST", "do_GET"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_collect_waits_for_no_answer_past_its_time(aws, executor, monkeypatch, drip, verb, ranks):
    """Also where several are asked at once, each in a thread of its own."""
    handles = executor().launch_replicas(ranks, "trainer:train", run_id="run-1")
    for handle in handles:
        aws.move(handle.metadata["job_name"], "Completed", "Completed")
    ours = executor(backoff=real_time())
    monkeypatch.setattr("diloco_sagemaker._client._calls._LAST_LOOK", 0.2)
    monkeypatch.setattr(aws.server.RequestHandlerClass, verb, lambda self: drip(self))
    begin = time.monotonic()
    with pytest.raises(UnavailableError):
        ours.collect(handles, timeout=0.5)
    assert time.monotonic() - begin < PATIENCE


def endless_list(aws, monkeypatch):
    numbers = iter(range(10**9))
    page = {"TrainingJobSummaries": []}
    monkeypatch.setattr(
        aws, "ListTrainingJobs", lambda body: {**page, "NextToken": f"t{next(numbers)}"}
    )


def test_a_list_has_an_end(aws, executor, monkeypatch):
    endless_list(aws, monkeypatch)
    monkeypatch.setattr("diloco_sagemaker._client._calls._MOST_PAGES", 20)
    with pytest.raises(UnavailableError, match="no end after 20 pages"):
        executor(retry_timeout=0).list_runs()
    assert aws.count("ListTrainingJobs") == 20


def test_collect_reads_no_list_past_its_time(aws, executor, monkeypatch):
    """Each page of it takes half a second."""
    ours = executor()
    handles = ours.launch_replicas(3, "trainer:train", run_id="run-1")
    endless_list(aws, monkeypatch)
    begin, asked = aws.clock(), aws.count("ListTrainingJobs")
    with pytest.raises(UnavailableError, match="there is no end after"):
        ours.collect(handles, timeout=20)
    assert aws.clock() - begin < 30
    assert aws.count("ListTrainingJobs") - asked < 60


def test_a_page_that_leads_to_itself_is_not_the_end_of_a_list(aws, executor):
    launch(executor())
    aws.ListTrainingJobs = lambda body: {"TrainingJobSummaries": [], "NextToken": "again"}
    for ask in (
        lambda ours: ours.exists("run-1"),
        lambda ours: ours.list_runs(),
        lambda ours: ours.attach("run-1"),
    ):
        with pytest.raises(UnavailableError, match="a page leads to itself"):
            ask(executor(retry_timeout=0))


def test_a_launch_waits_no_longer_than_its_time_whatever_aws_asks_for(aws, executor, network):
    ours = executor(endpoint_url=network.url, retry_timeout=5)
    words = b'{"__type": "ThrottlingException", "message": "slow down"}'
    network.kind = "CreateTrainingJob"
    network.always = (400, _JSON, words, (("Retry-After", "80000"), *_ID))
    begun = aws.now
    with pytest.raises(ThrottledError, match="slow down"):
        launch(ours)
    assert aws.now - begun < 80


def test_a_long_text_of_aws_is_cut_before_secrets_are_looked_for(aws, executor):
    spent = []
    for length in (20_000, 2_000_000):
        words = ("password: ab1cdefg, " * (length // 20))[:length]
        aws.faults.append(("ListTrainingJobs", "ValidationException", words, 400, False))
        ours = executor()
        with pytest.raises(InvalidRequestError):
            ours.exists("run-2")
        aws.faults.append(("ListTrainingJobs", "ValidationException", words, 400, False))
        begun = time.thread_time()
        with pytest.raises(InvalidRequestError, match="password: ") as caught:
            ours.list_runs()
        spent.append(time.thread_time() - begun)
        assert "ab1cdefg" not in str(caught.value)
    assert spent[1] < 10 * spent[0]


def test_tags_are_read_up_to_the_one_that_is_looked_for(aws, executor, monkeypatch):
    """None is kept: there may be 10,000 pages of them, each as large as an answer can be."""
    (handle,) = executor().launch_replicas(1, "trainer:train", run_id="run-1")
    aws.move("diloco-run-1-00000", "Stopped", "Stopped")
    monkeypatch.setattr("diloco_sagemaker._client._calls._MOST_PAGES", 20)
    pages = []

    def endless(body):
        pages.append(body)
        keys = (f"{len(pages)}", "diloco:cancelled" if len(pages) == 2 else "other")
        return {"Tags": [{"Key": key, "Value": ""} for key in keys], "NextToken": f"{len(pages)}"}

    aws.ListTags = endless
    status = executor(retry_timeout=0).describe(handle)
    assert (status.reason, len(pages)) == (Reason.CANCEL_REQUESTED, 2)


@pytest.mark.parametrize("operation", ["DescribeTrainingJob", "Search"])
def test_a_job_that_says_more_than_any_is_not_kept(aws, executor, operation):
    handles = executor().launch_replicas(4, "trainer:train", run_id="run-1")
    for job in aws.jobs.values():
        job["FailureReason"] = "x" * 1_000_000
    ours = executor(retry_timeout=0)
    look = ours.collect if operation == "Search" else lambda *_, **__: ours.describe(handles[0])
    with pytest.raises(UnavailableError, match="it says more than 262144 characters"):
        look(handles, timeout=0)
    assert aws.count(operation)


def test_lists_that_say_more_than_any_are_not_kept(aws, executor, monkeypatch):
    executor().launch_replicas(4, "trainer:train", run_id="run-1")
    for job in aws.jobs.values():
        job["SecondaryStatus"] = "x" * 100_000
    monkeypatch.setattr("diloco_sagemaker._client._calls._KEPT_OF_LIST", 300_000)
    with pytest.raises(UnavailableError, match="it says more than 300000 characters"):
        executor(retry_timeout=0).list_runs()
