"""Secrets stay out of what is shown."""

import json

import pytest

from diloco_protocol import ReplicaSpec
from diloco_protocol.backend import REDACTED, redact, redact_json, redact_spec, redact_text


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "PGPASSWD", "GOOGLE_APPLICATION_CREDENTIALS",
        "WANDB_API_KEY", "apikey", "ACCESSKEY", "PRIVATE_KEY", "DB_PWD", "authorization", "tokens",
    ],
)  # fmt: skip
def test_values_with_the_name_of_a_secret_are_left_out(name):
    assert redact(name, "hunter2") == REDACTED == "<redacted>"
    assert redact_json({name: "hunter2"}) == {name: REDACTED}


@pytest.mark.parametrize(
    "name", ["PATH", "AWS_REGION", "KEYBOARD", "OMP_NUM_THREADS", "tokenizer", "TOKENISER"]
)
def test_other_values_are_shown(name):
    assert redact(name, "hunter2") == "hunter2"


# Put together here, so that nobody who looks for tokens in this file finds one.
TOKENS = [
    "AKIA" + "Q3EGRIRXBIXFOMXS",
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "a1B2_" * 9,
    "glpat-" + "a1B2" * 5,
    "hf_" + "a1B2" * 9,
    "sk-" + "proj-a1B2" * 4,
    "sk-" + "ant-api03-a1B2" * 4,
    "xoxb-" + "123456789012",
    "sk_live_" + "a1B2" * 6,
    "AIza" + "a1B2c" * 7,
    "npm_" + "a1B2" * 9,
    "pypi-" + "a1B2c" * 12,
    "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxIn0xyz" + ".c2lnbmF0dXJl",
    "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIE\nabc\n-----END RSA " + "PRIVATE KEY-----",
]


@pytest.mark.parametrize("token", TOKENS, ids=lambda token: token[:8])
def test_known_tokens_are_found_wherever_they_stand(token):
    assert redact_text(token) == REDACTED
    assert redact("ARGS", f"--use={token} now") == f"--use={REDACTED} now"
    assert redact_json({"a": [{"b": f"x {token}"}]}) == {"a": [{"b": f"x {REDACTED}"}]}


@pytest.mark.parametrize(
    "text",
    ["", "task-0123456789012345678901234567", "hf_model", "s3://bucket/run", "sk-learn", "a@b.org",
     "https://host:9000/path", "https://host/mail?to=a@b", "HuggingFaceTB/SmolLM2-135M"],
)  # fmt: skip
def test_what_has_no_secret_is_left_as_it_is(text):
    assert redact_text(text) == text


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://key:secret@bucket/run", "s3://<redacted>@bucket/run"),
        ("s3://key:se/cr@et@bucket/run", "s3://<redacted>@bucket/run"),
        ("redis://:password@host:6379", "redis://<redacted>@host:6379"),
        ("https://user@host/x", "https://<redacted>@host/x"),
        ("https://host/x?sig=abc&page=2", "https://host/x?sig=<redacted>&page=2"),
        ("at s3://a:b@c, 's3://d:e@f'", "at s3://<redacted>@c, 's3://<redacted>@f'"),
    ],
)
def test_users_and_passwords_are_taken_out_of_uris(uri, shown):
    assert redact_text(uri) == shown


def test_all_below_the_name_of_a_secret_is_left_out():
    assert redact_json({"secrets": {"a": ["x", {"b": "y"}]}, "n_tokens": 4096, "none": None}) == {
        "secrets": {"a": [REDACTED, {"b": REDACTED}]},
        "n_tokens": 4096,
        "none": None,
    }


def test_a_spec_without_its_secrets():
    kwargs = {"hub": {"token": "t0p"}, "data": "s3://a:b@c", "steps": 3}
    spec = ReplicaSpec("m:f", kwargs, rank=1, world_size=2, rendezvous_uri="s3://u:p@bucket")
    shown = redact_spec(spec)
    assert shown.kwargs == {"hub": {"token": REDACTED}, "data": f"s3://{REDACTED}@c", "steps": 3}
    assert shown.rendezvous_uri == f"s3://{REDACTED}@bucket"
    assert (shown.entrypoint, shown.rank, shown.world_size) == ("m:f", 1, 2)
    assert json.dumps(spec.kwargs) == json.dumps(kwargs), "the spec itself is as it was"


@pytest.mark.parametrize("text", ["x", "a:", "s3://", "://", "eyJ", "sk-", "-----BEGIN ", "@?a="])
def test_long_texts_take_linear_time(text):
    """Arguments may be a megabyte of one word; what is quadratic would take hours, and the suite would be stopped."""
    redact_text(text * 1_000_000)
