"""The caller and the size are known before a body is read; any odd body gets an answer."""

from __future__ import annotations

import http.client
import json
import socket

import pytest

from diloco_localcloud._server._faults import Call

PATIENCE = 600.0
GIB = 1 << 30


def ask(
    lab,
    length,
    *,
    key=None,
    service="sagemaker",
    target="ListTrainingJobs",
    body=b"",
    path="/",
    method="POST",
):
    """The status and the text of the answer to a request that says it is ``length`` bytes long."""
    key = lab.stand_in.environment["AWS_ACCESS_KEY_ID"] if key is None else key
    scope = f"{key}/20260101/us-east-1/{service}/aws4_request"
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {length}"]
    lines.append(f"X-Amz-Target: {'SageMaker' if service == 'sagemaker' else 'Logs'}.{target}")
    if key:
        lines.append(f"Authorization: AWS4-HMAC-SHA256 Credential={scope}, Signature=x")
    port = int(lab.stand_in.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        connection.shutdown(
            socket.SHUT_WR
        )  # whoever waits for more gets nothing, and the test fails
        with http.client.HTTPResponse(connection) as response:
            response.begin()
            return response.status, response.read().decode()


@pytest.mark.sampled
@pytest.mark.parametrize("service", ["sagemaker", "s3", "sts", "logs"])
@pytest.mark.parametrize("key", ["", "AKIANOBODY"])
def test_whoever_has_no_key_is_refused_before_the_body(lab, service, key):
    status, text = ask(
        lab,
        GIB,
        key=key,
        service=service,
        path="/bucket/key",
        method="PUT" if service == "s3" else "POST",
    )
    assert 400 <= status < 500
    assert "oken" in text or "AccessKey" in text
    assert [call.status for call in lab.stand_in.calls] == [status]


@pytest.mark.parametrize("before", ["", "Credential=", "AWS4-HMAC-SHA256 x, "])
def test_a_key_stands_at_the_beginning(lab, before):
    """A search for it takes quadratic time, which whoever has no key could ask for."""
    key = lab.stand_in.environment["AWS_ACCESS_KEY_ID"]
    status, text = send(lab, f"{before}Credential={key}/20260101/us-east-1/sagemaker/aws4_request")
    assert (status, "Missing Authentication Token" in text) == (400, True)


@pytest.mark.parametrize("scope", ["us-east-1/{}", "{}/sagemaker", "us-east-1/{}/aws4_request,"])
def test_nothing_that_is_sent_without_a_key_is_kept(lab, scope):
    for word in ("s" * 60, "s" * 50_000):
        words = f"Credential=x/20260101/{scope.format(word)}/aws4_request"
        assert send(lab, f"AWS4-HMAC-SHA256 {words}")[0] == 400
    assert list(lab.stand_in.calls) == [Call("", "", "", 400)] * 2


def send(lab, authorization):
    """The status and the text of the answer to a request with these words."""
    port = int(lab.stand_in.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        head = f"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: {authorization}\r\n\r\n"
        connection.sendall(head.encode())
        with http.client.HTTPResponse(connection) as response:
            response.begin()
            return response.status, response.read().decode()


@pytest.mark.parametrize(
    ("service", "length"),
    [("sagemaker", GIB), ("logs", GIB), ("sts", GIB), ("iam", GIB), ("s3", 6 * GIB), ("else", GIB)],
)
def test_what_is_too_large_is_refused_before_the_body(lab, service, length):
    status, text = ask(lab, length, service=service)
    assert status == (400 if service == "s3" else 413)
    assert "EntityTooLarge" in text


def test_another_region_is_told_before_the_body(lab):
    lab.stand_in._region.name = "eu-west-1"
    status, text = ask(lab, GIB)
    assert (status, "is in eu-west-1, not in us-east-1" in text) == (400, True)


@pytest.mark.parametrize(
    ("service", "target", "body"),
    [
        ("sagemaker", "ListTrainingJobs", b"[" * 100_000),
        ("sagemaker", "ListTrainingJobs", b'{"MaxResults": ' + b"9" * 5000 + b"}"),
        ("sagemaker", "ListTrainingJobs", b'{"CreationTimeAfter": ' + b"9" * 4000 + b"}"),
        ("sagemaker", "ListTrainingJobs", b'{"CreationTimeAfter": NaN, "MaxResults": 1e400}'),
        ("sagemaker", "ListTrainingJobs", b'{"NextToken": "W1tb"}'),
        ("sagemaker", "ListTrainingJobs", b"\xff"),
        ("logs", "GetLogEvents", json.dumps({
            "logGroupName": "/aws/sagemaker/TrainingJobs", "logStreamName": "job/algo-1-1767225600",
            "nextToken": f"f/{'9' * 5000}"}).encode()),
    ],
)  # fmt: skip
def test_no_body_is_too_odd_for_an_answer(lab, service, target, body):
    lab.create().log("one")
    status, text = ask(lab, len(body), service=service, target=target, body=body)
    assert status == 400
    assert "__type" in text


def test_a_job_with_numbers_that_are_too_large_is_refused(lab):
    request = lab.request(StoppingCondition={"MaxRuntimeInSeconds": 10**400})
    body = json.dumps(request).encode()
    status, text = ask(lab, len(body), target="CreateTrainingJob", body=body)
    assert (status, "maxRuntimeInSeconds must be of type integer" in text) == (400, True)
    assert lab.world.jobs() == []
