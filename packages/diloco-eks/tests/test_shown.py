"""A plan is looked at, mailed and logged, so no secret is in it."""

import json

import pytest

from diloco_eks import EKSExecutor
from diloco_eks._state._reading import read_pod
from diloco_eks._state._verdict import native_end
from diloco_protocol import DilocoError, ReplicaHandle, spec_from_environment
from diloco_protocol.backend import REDACTED

SECRETS = {
    "WANDB_API_KEY": "k-1-of-many",
    "STORE": "s3://user:k-1-of-many@bucket/run",
    "ARGS": "--hub hf_" + "a1B2" * 9,
}
KWARGS = {
    "hub": {"token": "k-1-of-many", "name": "model"},
    "data": "s3://user:k-1-of-many@bucket/data",
    "rendezvous_uri": "s3://user:k-1-of-many@bucket/run",
    "price": "$5 $(HOME)",
}


def container_of(job):
    return job["spec"]["template"]["spec"]["containers"][0]


def told(job):
    """The spec that the replicas of a shown Job would read."""
    variables = {entry["name"]: entry.get("value") for entry in container_of(job)["env"]}
    return spec_from_environment(variables)


def test_no_secret_is_shown(bench):
    executor = bench.executor(annotations={"hook": "https://user:k-1-of-many@example.org/x"})
    plan = executor.plan(2, "trainer:train", KWARGS, env={"MODE": "fast", **SECRETS})
    (job,) = plan.requests
    shown = told(job)
    assert "k-1-of-many" not in json.dumps([*plan.requests, shown.to_dict()])
    assert "a1B2" not in json.dumps(plan.requests)
    assert shown.kwargs == {
        "hub": {"token": REDACTED, "name": "model"},
        "data": f"s3://{REDACTED}@bucket/data",
        "rendezvous_uri": f"s3://{REDACTED}@bucket/run",
        "price": "$5 $(HOME)",
    }
    assert shown.rendezvous_uri == f"s3://{REDACTED}@bucket/run"
    values = {entry["name"]: entry.get("value") for entry in container_of(job)["env"]}
    assert values["MODE"] == "fast"
    assert job["metadata"]["annotations"]["hook"] == f"https://{REDACTED}@example.org/x"


def test_the_secrets_themselves_are_sent(bench):
    executor = bench.executor()
    executor.launch_replicas(2, "trainer:train", KWARGS, run_id="run-1", env=SECRETS)
    sent = bench.world.job("run-1")
    assert told(sent).kwargs == KWARGS
    values = {entry["name"]: entry.get("value") for entry in container_of(sent)["env"]}
    assert {name: values[name] for name in SECRETS} == SECRETS


def test_a_handle_holds_no_password(bench):
    executor = bench.executor()
    (handle,) = executor.launch_replicas(1, "trainer:train")
    host, plain = bench.stand_in.url.split("://")[1], bench.stand_in.url
    configuration = executor._client._api_client().configuration
    configuration.host = f"https://user:k-1-of-many@{host}"
    assert executor.attach(handle.run_id)[0].metadata["server"] == plain.rstrip("/")


def test_wherever_it_stands(bench):
    secret = "k-1-of-many"
    overlay = {
        "metadata": {"annotations": {"auth-token": secret}},
        "spec": {
            "initContainers": [
                {
                    "name": "first",
                    "image": f"user:{secret}@registry.example/first:1",
                    "command": ["fetch", f"--password={secret}", "--token", secret],
                    "env": [{"name": "DB_PASS", "value": secret}],
                }
            ]
        },
    }
    executor = bench.executor(
        annotations={"note": f"Authorization: Bearer {secret}"},
        env={"OPENAI_KEY": secret},
        command=["wrap", f"--api-key={secret}", "python", "-m", "diloco_protocol.runner"],
        pod_overlay=overlay,
    )
    plan = executor.plan(1, "trainer:train")
    assert secret not in json.dumps(plan.requests)
    assert secret not in repr(plan)


@pytest.mark.parametrize("name", ["DB_PASSWORD", "HF_TOKEN"])
def test_a_value_under_the_name_of_a_secret_is_in_no_refusal(bench, name):
    secret = "k-1 of many"
    refused = [
        *({"labels": {name: value}} for value in (secret, [secret])),
    ]
    for options in refused:
        with pytest.raises(DilocoError) as caught:
            EKSExecutor("image", kubeconfig=bench.kubeconfig, **options)
        assert next(iter(options)) in str(caught.value)
        assert secret not in str(caught.value)
    with pytest.raises(DilocoError, match="labels") as caught:
        bench.executor().plan(1, "trainer:train", labels={name: secret})
    assert secret not in str(caught.value)


@pytest.mark.sampled
@pytest.mark.parametrize("field", ["job_name", "namespace", "first_rank"])
def test_what_a_handle_says_is_cut_in_errors(bench, field):
    run = bench.launch(1)
    (handle,) = run.handles
    long = {**handle.metadata, field: "x" * 200_000}
    other = ReplicaHandle(0, "eks", long, run_id=handle.run_id, world_size=1)
    told = {"describe": "", "stream_logs": "", "cancel": ""}
    for verb in told:
        with pytest.raises(DilocoError) as caught:
            getattr(run.executor, verb)(other)
        told[verb] = str(caught.value)
    assert max(map(len, told.values())) < 2000
    assert run.executor.poll(handle) == "running"


def test_the_reason_of_a_pod_is_cut_and_has_no_secret(a_pod):
    reason = "Failed https://user:k-1-of-many@registry.example " + "R" * 5000
    ended = read_pod(a_pod(0, "Failed", {"terminated": {"reason": reason}}, reason=reason))
    for told in (ended.reason, native_end(ended)):
        assert "Failed https://<redacted>@registry.example RRR" in told
        assert len(told) < 200
