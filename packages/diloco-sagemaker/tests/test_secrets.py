"""What is secret is in no error, no plan and no repr."""

import traceback

import boto3
import pytest

from diloco_protocol import AuthError, DilocoError, InvalidRequestError, spec_from_environment
from diloco_protocol.backend import variables_from_strings

HIDDEN = "hunter2-9f3c"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_s3_path", f"s3://key:{HIDDEN}@bucket/runs"),
        ("output_s3_path", f"s3://key:se/cret{HIDDEN}@bucket"),
        ("output_s3_path", f"s3://key:{HIDDEN} \0@bucket"),
        ("checkpoint_s3_path", f"s3://{HIDDEN}@bucket/runs"),
        ("endpoint_url", f"http://key:{HIDDEN}@127.0.0.1:9"),
        ("endpoint_url", f"http://key:a/{HIDDEN}@127.0.0.1:9"),
        ("endpoint_url", f"ftp://key:{HIDDEN}'\"@127.0.0.1:9"),
        ("image_uri", f"key:{HIDDEN}@registry/trainer:1"),
        ("image_uri", f"https://key:{HIDDEN}@registry/trainer@sha256:{'0' * 64}"),
        ("session", {"aws_secret_access_key": HIDDEN}),
        ("request_overlay", f"PASSWORD {HIDDEN}"),
        ("request_overlay", {"Environment": [HIDDEN]}),
        ("request_overlay", {"TensorBoardOutputConfig": {"S3OutputPath": {"PASSWORD": HIDDEN}}}),
        ("env", {"1A": HIDDEN}),
    ],
)  # fmt: skip
def test_what_is_refused_is_not_shown(aws, executor, name, value):
    with pytest.raises(InvalidRequestError) as caught:
        executor(**{name: value}).launch_replicas(1, "trainer:train", run_id="run-1", gpu="L4")
    assert HIDDEN not in str(caught.value)
    if name not in {"request_overlay", "env"}:  # these are fields of it
        assert name in str(caught.value)
    assert aws.calls == []


def test_what_python_prints_of_an_error_has_no_secret(aws, executor):
    """It prints the errors that were the cause, too."""
    words = f"DB_PASSWORD={HIDDEN} is refused \x1b[2J https://me:{HIDDEN}@host"
    aws.faults.append(("ListTrainingJobs", "ValidationException", words, 400, False))
    with pytest.raises(InvalidRequestError) as caught:
        executor().list_runs()
    printed = "".join(traceback.format_exception(caught.value))
    assert "DB_PASSWORD=" in printed
    assert HIDDEN not in printed
    assert "\x1b" not in printed
    assert "botocore" in printed  # where it was


@pytest.mark.parametrize(
    "image",
    ["trainer", "registry:5000/a/b:1", f"a.b/c@sha256:{'0' * 64}", f"a/b:1@sha256:{'0' * 64}"],
)
def test_images_that_are_allowed(offline, image):
    assert offline(image_uri=image).plan(1, "trainer:train").requests


def test_places_in_s3_that_are_allowed(offline):
    """A key may have an '@'."""
    path = "s3://bucket/team@home"
    (request,) = offline(output_s3_path=path).plan(1, "trainer:train").requests
    assert request["OutputDataConfig"]["S3OutputPath"] == path


def test_a_plan_has_no_secret(offline):
    executor = offline(
        tags={"DB_PASS": HIDDEN, "team": "us"},
        command=["run", f"--password={HIDDEN}", "--token", HIDDEN],
        env={"WANDB_KEY": HIDDEN, "LONG_SECRET": HIDDEN * 100, "PLAIN": "shown"},
    )
    (request,) = executor.plan(
        1,
        "trainer:train",
        {"password": HIDDEN, "uri": f"s3://key:{HIDDEN}\0@bucket/x", "plain": "shown"},
        labels={"SSH_KEY": HIDDEN},
        env={"MORE": f"Authorization: Bearer {HIDDEN}"},
        run_id="run-1",
    ).requests
    strings = request["HyperParameters"]
    inside = [spec_from_environment(strings).kwargs, variables_from_strings(strings)]
    assert HIDDEN not in repr((request, inside))
    assert inside[0]["plain"] == request["Environment"]["PLAIN"] == "shown"
    assert {"Key": "team", "Value": "us"} in request["Tags"]


def test_a_repr_has_no_secret(aws, executor):
    options = {"env": {"PASSWORD": HIDDEN}, "tags": {"DB_PASS": HIDDEN}}
    ours = executor(**options)
    ours.launch_replicas(1, "trainer:train", run_id="run-1")
    launched = ours._jobs.describe("diloco-run-1-00000")
    for each in (ours, ours._options, ours._client, launched):
        assert HIDDEN not in repr(each)


@pytest.mark.parametrize("uri", [f"s3://key:{HIDDEN}\1@bucket/run", f"s3://{HIDDEN}@bucket/run"])
def test_a_rendezvous_is_tried_without_showing_it(aws, executor, uri):
    """There is no image here that could try it."""
    words = f"{uri} is not allowed"
    aws.faults.append(("CreateTrainingJob", "ValidationException", words, 400, False))
    findings = executor().check(rendezvous_uri=uri)
    assert [each.ok for each in findings if each.subject == "rendezvous"] == [False]
    assert HIDDEN not in repr(findings)
    with pytest.raises(InvalidRequestError) as caught:
        executor().check(rendezvous_uri=uri.replace("@", "\0@"))
    assert HIDDEN not in str(caught.value)


def test_an_error_of_aws_is_shown_without_what_is_secret(aws, executor):
    text = f"no: s3://key:{HIDDEN}@bucket, \x1b[2J --password={HIDDEN}"
    aws.faults.append(("ListTrainingJobs", "ValidationException", text, 400, False))
    with pytest.raises(DilocoError) as caught:
        executor().list_runs()
    assert HIDDEN not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.sampled
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("end", ["\r", "\n", "\nx"])
def test_credentials_that_cannot_be_sent_are_not_shown(aws, executor, place, end):
    """As of a file with the line ends of Windows."""
    held = ["key", "secret", "token"]
    held[place] = f"{HIDDEN}{end}"
    session = boto3.Session(*held, region_name="eu-west-1")
    begun = aws.now
    (finding,) = executor(session=session).check()
    assert (finding.subject, finding.ok) == ("credentials", False)
    assert "the variables AWS_" in finding.message
    assert HIDDEN not in finding.message
    for act in (
        lambda ours: ours.list_runs(),
        lambda ours: ours.launch_replicas(1, "trainer:train"),
    ):
        with pytest.raises(AuthError, match="a character that cannot be sent") as caught:
            act(executor(session=session))
        assert HIDDEN not in "".join(traceback.format_exception(caught.value))
    assert aws.now == begun  # it was not tried again


@pytest.mark.parametrize("place", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SAGEMAKER", "the profile"])
def test_an_endpoint_of_the_environment_may_hold_no_password(
    aws, executor, monkeypatch, tmp_path, place
):
    url = aws.url.replace("://", f"://me:{HIDDEN}@")
    (tmp_path / "config").write_text(
        f"[default]\nendpoint_url = {url}\n" if place == "the profile" else ""
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    if place != "the profile":
        monkeypatch.setenv(place, url)
    with pytest.raises(InvalidRequestError, match=r"AWS_ENDPOINT_URL.*no password") as caught:
        executor(endpoint_url=None).list_runs()
    assert HIDDEN not in str(caught.value)
    assert aws.calls == []
