"""Answers of real services: the code decides, not the status. Real HTTP, both drivers for S3.

The answers of GCS and Azure are those that their libraries raise: their own code where it is
installed, else what it raises.
"""

import json
from importlib import import_module

import pytest

from diloco_core import ConfigurationError, StoreUnavailableError, Timing
from diloco_core._store._api import creates_once
from diloco_core._store._drivers._driver import _BY_CODE, _TABLE, Verdict, verdict_of
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._store._transfer import PART_BYTES

ACTS = {
    "write": ("PUT", lambda store: store.put("k", [b"x"])),
    "create": ("PUT", lambda store: store.create("new", b"x")),
    "read": ("GET", lambda store: store.get("k")),
    "list": ("GET", lambda store: store.list("")),
    "delete": ("POST", lambda store: store.delete(["k"])),
}


def pairs(*answers):
    """Each answer to two of the requests, other ones each time; to the others in the slow lane."""
    return [
        pytest.param(act, *answer, marks=[] if (number + place) % 5 < 2 else pytest.mark.slow)
        for number, answer in enumerate(answers)
        for place, act in enumerate(ACTS)
    ]


@pytest.fixture
def store(small_s3, driver, remote):
    opened = remote(driver, patience=600)
    opened.put("k", [b"value"])
    small_s3.log.clear()
    return opened


def failing(store, small_s3, act, status, times, code):
    """Let the requests of an act fail; a function that does it."""
    method, run = ACTS[act]
    if act == "delete" and not store.driver.deletes_many:
        method = "DELETE"
    small_s3.fail(status, method, times=times, code=code)
    return lambda: run(store)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("act", "status", "code"),
    pairs(
        (400, "RequestTimeout"),
        (400, "IncompleteBody"),
        (400, "BadDigest"),
        (403, "SlowDown"),
        (400, "ThrottlingException"),
        (403, "ServiceUnavailable"),
        (409, "OperationAborted"),
        (403, "RequestTimeTooSkewed"),
        (400, "ExpiredToken"),
        (400, "TokenRefreshRequired"),
        (403, "RequestExpired"),
    ),
)
def test_what_passes_is_tried_again(store, small_s3, act, status, code):
    failing(store, small_s3, act, status, 2, code)()
    assert [fault.times for fault in small_s3.faults] == [0]


@pytest.mark.sampled
@pytest.mark.parametrize("code", ["RequestTimeout", "ExpiredToken", "AccessDenied", "SlowDown"])
def test_an_answer_without_a_body_is_asked_for_its_reason(store, small_s3, code):
    """The answer to HEAD has none: so s3fs asks for the size of an object."""
    status = 403 if code in {"AccessDenied", "SlowDown"} else 400
    for method in ("HEAD", "GET"):
        small_s3.fail(status, method, times=1, code=code)
    if code == "AccessDenied":
        with pytest.raises(StoreUnavailableError, match=r"AccessDenied"):
            store.open("k")
    else:
        with store.open("k") as reader:
            assert reader.size == 5


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("act", "status", "code", "way_out"),
    pairs(
        (501, "NotImplemented", "refuses this kind of request"),
        (405, "MethodNotAllowed", "refuses this kind of request"),
        (400, "InvalidRequest", "refuses this kind of request"),
        (400, "UnsupportedHeader", "refuses this kind of request"),
        (501, "Injected", "refuses this kind of request"),
        (403, "AccessDenied", "check that this process's credentials"),
        (301, "PermanentRedirect", "set AWS_REGION"),
    ),
)
def test_what_is_refused_for_good_is_not(store, small_s3, clock, act, status, code, way_out):
    run = failing(store, small_s3, act, status, 99, code)
    with pytest.raises(StoreUnavailableError, match=way_out) as caught:
        run()
    assert clock.now == 0
    assert caught.value.lasting
    if status != 301:  # obstore does not show what such an answer says
        assert "no, said the store" in str(caught.value)
        assert code in str(caught.value)


def test_a_refused_conditional_write_names_itself_and_the_way_out(store, small_s3, clock):
    for status, code, text in (
        (501, "NotImplemented", r"conditional write \(If-None-Match: \*\).*a folder that all"),
        (403, "AccessDenied", r"a policy of the bucket refuses conditional writes"),
    ):
        small_s3.faults.clear()
        small_s3.fail(status, "PUT", times=99, code=code)
        with pytest.raises(StoreUnavailableError, match=text):
            creates_once(store)
    assert clock.now == 0


def test_the_way_out_of_a_driver_is_the_other_one(store, small_s3):
    small_s3.fail(400, "PUT", times=99, code="InvalidArgument")
    by_obstore = store.driver.name == "obstore"
    out = r"Try fsspec\+s3://" if by_obstore else "CALCULATION=when_required .* try obstore"
    with pytest.raises(StoreUnavailableError, match=out):
        store.put("k", [b"x"])


def test_a_wrong_clock_and_too_few_requests_are_named(store, small_s3, clock):
    small_s3.fail(403, "PUT", times=99, code="RequestTimeTooSkewed")
    with pytest.raises(StoreUnavailableError, match="clock of this machine is wrong") as caught:
        store.put("k", [b"x"])
    assert clock.now < 5
    assert caught.value.lasting
    small_s3.faults.clear()
    small_s3.fail(503, "PUT", times=9999, code="SlowDown")
    store.patience, before = 20, clock.now
    text = r"(?=.*SlowDown).*no, said the store.*for up to 20 s.* fewer connections="
    with pytest.raises(StoreUnavailableError, match=text):
        store.put("k", [b"x"])
    assert 10 < clock.now - before <= 20


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("what", "code"),
    [("lose", ""), (404, "NoSuchUpload"), ("late", "InternalError"), ("never", "RequestTimeout")]
    + [(what, "NoSuchUpload") for what in ("late", "never")],
)
def test_a_large_write_whose_last_answer_is_lost_is_sent_anew(store, small_s3, what, code):
    """The second try is told that there is no such upload, since the first has ended it."""
    data = bytes(range(256)) * (2 * PART_BYTES // 256) + b"end"
    small_s3.objects["run/large"] = bytes(len(data))  # damaged, and of the same size
    small_s3.fail(what, "POST", part="uploadId", code=code)
    patient = Patient(store, Timing())
    assert patient.put("large", lambda: iter([data])) == len(data)
    assert small_s3.objects["run/large"] == data


@pytest.mark.sampled
@pytest.mark.parametrize("code", ["RequestTimeout", "NoSuchUpload"])
def test_an_upload_in_parts_outlives_what_passes(store, small_s3, code):
    """obstore tries a part again by the status alone; so everything is sent anew."""
    data = bytes(range(256)) * (3 * PART_BYTES // 256)
    patient = Patient(store, Timing(sleep=bool))
    for write in (
        lambda: patient.put("large", lambda: iter([data])),
        lambda: store.put("large", [data]),
    ):
        small_s3.fail(400, "PUT", times=2, part="partNumber=2", code=code)
        write()
        assert small_s3.objects.pop("run/large") == data
        assert [fault.times for fault in small_s3.faults] == [0]
        small_s3.faults.clear()
    assert small_s3.uploads == {}


@pytest.mark.sampled
@pytest.mark.parametrize("status", [404, 400])
def test_a_write_is_never_told_that_there_is_no_object(store, small_s3, status):
    small_s3.fail(status, "PUT", times=99, code="NoSuchKey" if status == 404 else "Injected")
    for write in (
        lambda: store.put("k", [b"x"]),
        lambda: store.create("k", b"x"),
        lambda: store.put("k", iter([bytes(2 * PART_BYTES)])),
    ):
        with pytest.raises(StoreUnavailableError, match=r"cannot (write|create) object 'k'"):
            write()


@pytest.mark.parametrize("scheme", ["obstore+s3", "fsspec+s3"])
def test_a_prefix_may_have_the_name_of_an_error(small_s3, scheme):
    for name in ("SlowDown", "InternalError", "NoSuchBucket", "Credential", "latest/api/token"):
        if name in {"SlowDown", "InternalError"} and scheme == "obstore+s3":
            with pytest.raises(ConfigurationError, match=r"Write fsspec\+s3://"):
                open_store(f"{scheme}://bucket/a/{name}s")
            continue
        store = open_store(f"{scheme}://bucket/{name}")
        data = bytes(PART_BYTES + 1)
        assert store.put("large", iter([data])) == len(data)
        small_s3.fail(503, "GET", times=1)
        assert store.list("") == {"large": len(data)}
        store.delete(["large"])
        assert store.list("") == {}
        store.close()


def test_what_cannot_be_deleted_is_an_error(small_s3):
    """Also if the answer has status 200."""
    store = open_store("obstore+s3://bucket/run")
    small_s3.fail("kept", "POST", part="delete", code="AccessDenied")
    with pytest.raises(StoreUnavailableError, match=r"AccessDenied.*may put, get, list and delete"):
        store.delete(["k"])
    small_s3.fail("kept", "POST", part="delete", times=2, code="InternalError")
    store.delete(["k"])
    store.close()


def library(module, name):
    """A class or function of a library that need not be installed."""
    try:
        return getattr(import_module(module), name)
    except ImportError:
        return None


def of_gcsfs(status, reason, message):
    """Return what gcsfs makes of an answer."""
    said = {"code": status, "message": message, "errors": [{"reason": reason}]}
    path = "https://storage.googleapis.com/upload/b/rate limit/o"
    validate = library("gcsfs.retry", "validate_response")
    if validate is not None:
        with pytest.raises(Exception) as caught:
            validate(status, json.dumps({"error": said}).encode(), path)
        return caught.value
    if status == 403:
        return OSError(f"Forbidden: {path}\n{message}")
    if status in {404, 412}:
        return {404: FileNotFoundError, 412: FileExistsError}[status](path)
    error = type("HttpError", (Exception,), {})(f"{message}, {status}")
    error.code = status
    return error


@pytest.mark.parametrize(
    ("status", "reason", "message", "verdict"),
    [
        (403, "forbidden", "a@b does not have storage.objects.create access", Verdict.FORBIDDEN),
        (403, "accountDisabled", "The billing account is disabled", Verdict.FORBIDDEN),
        (403, "userRateLimitExceeded", "User Rate Limit Exceeded", Verdict.THROTTLED),
        (401, "authError", "Invalid Credentials", Verdict.EXPIRED),
        (404, "notFound", "No such object", Verdict.MISSING),
        (412, "conditionNotMet", "At least one of the conditions failed", Verdict.EXISTS),
        (429, "rateLimitExceeded", "Rate limit exceeded", Verdict.THROTTLED),
        (503, "backendError", "Backend Error", Verdict.TRANSIENT),
    ],
)
def test_the_answers_of_gcs(status, reason, message, verdict):
    found, text = FsspecDriver("memory://gcs").judge(of_gcsfs(status, reason, message))
    assert found is verdict
    assert message in text or status in {404, 412}


@pytest.mark.parametrize(
    ("status", "code", "name", "verdict"),
    [
        (401, "InvalidAuthenticationInfo", "ClientAuthenticationError", Verdict.EXPIRED),
        (401, None, "ClientAuthenticationError", Verdict.EXPIRED),
        (401, "NoAuthenticationInformation", "ClientAuthenticationError", Verdict.FORBIDDEN),
        (403, "AuthenticationFailed", "ClientAuthenticationError", Verdict.FORBIDDEN),
        (403, "AuthorizationPermissionMismatch", "HttpResponseError", Verdict.FORBIDDEN),
        (409, "BlobAlreadyExists", "ResourceExistsError", Verdict.EXISTS),
        (412, "ConditionNotMet", "ResourceModifiedError", Verdict.EXISTS),
        (412, "LeaseIdMissing", "HttpResponseError", Verdict.PERMANENT),
        (503, "ServerBusy", "HttpResponseError", Verdict.THROTTLED),
    ],
)
def test_the_answers_of_azure(status, code, name, verdict):
    kind = library("azure.core.exceptions", name) or type(name, (Exception,), {})
    error = kind("no, said the store")
    error.status_code, error.error_code = status, code
    found, text = FsspecDriver("memory://azure").judge(error)
    assert found is verdict
    assert "no, said the store" in text


def test_other_answers():
    for name in ("CredentialUnavailableError", "RefreshError", "NonRetryableError"):
        error = type(name, (Exception,), {})("none")
        assert FsspecDriver("memory://none").judge(error)[0] is Verdict.EXPIRED
    for code in (None, "412"):  # a condition that failed, without a body
        assert verdict_of(412, code) is Verdict.EXISTS
    assert len(_BY_CODE) == sum(len(codes.split()) for codes in _TABLE.values()), "each code once"
