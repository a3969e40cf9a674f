"""The bundled policies allow each call that is made, and nothing of what others keep there."""

import json
import sys
from fnmatch import fnmatchcase
from importlib.resources import files

import boto3
import botocore.session
import pytest
from scripted_aws import BUCKET, OPTIONS, PREFIX, AWSHarness

from diloco_localcloud import SageMakerProcesses
from diloco_protocol import Backoff, Outcome
from diloco_sagemaker import SageMakerExecutor

GROUP = "arn:aws:logs:us-east-1:123456789012:log-group:/aws/sagemaker/TrainingJobs"
WORDS = {
    "REGION": "us-east-1", "ACCOUNT": "123456789012", "BUCKET": BUCKET, "RUNS": PREFIX,
    "RENDEZVOUS": "meet",
    "REPOSITORY": "trainer", "ROLE": "trainer", "PARTITION": "aws",
}  # fmt: skip


def allows(name, action, resource):
    """Say if a policy allows an action, as IAM decides it with no denials and met conditions."""
    text = (files("diloco_sagemaker") / f"{name}_policy.json").read_text(encoding="utf-8")
    for word, value in WORDS.items():
        text = text.replace(word, value)
    return any(
        fnmatchcase(action, wanted) and fnmatchcase(resource, statement["Resource"])
        for statement in json.loads(text)["Statement"]
        for wanted in (
            [statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"]
        )
    )


def rights(service, operation, params):
    """What a caller must be allowed for a call, as (action, resource)."""
    if service == "sts":
        return []
    if service == "s3":
        bucket = f"arn:aws:s3:::{params['Bucket']}"
        if "Key" not in params:
            return [("s3:ListBucket", bucket)]
        return [(f"s3:{operation}", f"{bucket}/{params['Key']}")]
    if service == "logs":
        return [(f"logs:{operation}", f"{GROUP}:log-stream:{params.get('logStreamName', '')}")]
    if service == "ecr":
        return [(f"ecr:{operation}", "arn:aws:ecr:us-east-1:123456789012:repository/trainer")]
    if service != "sagemaker":
        return [(f"{service.replace('-', '')}:{operation}", "*")]
    name = params.get("TrainingJobName", params.get("ResourceArn", "/").rpartition("/")[2])
    job = f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}" if name else "*"
    needed = [(f"sagemaker:{operation}", job)]
    if operation == "CreateTrainingJob":
        needed += [("sagemaker:AddTags", job), ("iam:PassRole", params["RoleArn"])]
    return needed


def recorded(stand_in, **options):
    """An executor, and the rights that its calls so far needed."""
    core, needed = botocore.session.Session(), set()

    def note(params, model, **_):
        needed.update(rights(model.service_model.service_name, model.name, params))

    core.register("provide-client-params", note)
    known = stand_in.client_options
    session = boto3.Session(
        known["aws_access_key_id"],
        known["aws_secret_access_key"],
        region_name="us-east-1",
        botocore_session=core,
    )
    options = {**OPTIONS, "endpoint_url": stand_in.url, "session": session, **options}
    return SageMakerExecutor(**options), needed


def test_a_launcher_may_make_every_call_of_every_verb():
    world = AWSHarness()
    try:
        executor, needed = recorded(world.stand_in, backoff=world.backoff(), clock=world.clock)
        executor.check(2, spot=True)
        handles = executor.launch_replicas(5, "trainer:train", run_id="run-1", spot=True)
        executor.launch_replicas(5, "trainer:train", run_id="run-1", spot=True)
        world.s3.put_object(
            Bucket=BUCKET, Key=f"{PREFIX}/checkpoints/diloco-run-1-00000/step", Body=b""
        )
        for handle in handles:
            world.of(handle).start()
            world.of(handle).log("works")
        executor.cancel(handles[0])
        for handle in handles[1:]:
            content = Outcome(0, result=1).to_json().encode()
            world.s3.put_object(Bucket=BUCKET, Key=world.result_key(handle), Body=content)
            world.of(handle).succeed()
        world.settle()
        assert executor.stream_logs(handles[0]) == "works"
        assert [each["result"] for each in executor.collect(handles, timeout=60)] == [
            None,
            1,
            1,
            1,
            1,
        ]
        other, also = recorded(world.stand_in, backoff=world.backoff())
        with other:
            assert other.describe(handles[0]).state.value == "cancelled"
        needed |= also
        executor.cancel_run("run-1")
        executor.purge(handles[0])
        assert executor.list_runs() == []
        executor.close()
    finally:
        world.close()
    actions = {action for action, _ in needed}
    text = (files("diloco_sagemaker") / "launcher_policy.json").read_text(encoding="utf-8")
    for statement in json.loads(text)["Statement"]:
        listed = statement["Action"]
        assert set([listed] if isinstance(listed, str) else listed) <= actions  # no right is idle
    assert [each for each in sorted(needed) if not allows("launcher", *each)] == []


@pytest.mark.processes
def test_a_replica_may_make_every_call_of_a_rendezvous():
    pytest.importorskip("diloco_core")
    with SageMakerProcesses() as stand_in:
        s3 = boto3.client("s3", **stand_in.client_options)
        s3.create_bucket(Bucket=BUCKET)
        s3.close()
        executor, needed = recorded(
            stand_in,
            backoff=Backoff(first=0.05, factor=1.5, cap=0.5),
            command=[sys.executable, "-m", "diloco_protocol.runner"],
        )
        with executor:
            findings = executor.check(rendezvous_uri=f"s3://{BUCKET}/meet/run-1", patience=600.0)
        assert [each.message for each in findings if each.subject == "rendezvous" and each.ok]
        calls = [call for call in stand_in.calls if call.resource == "s3"]
    mine = {(call.verb, call.name) for call in calls if call.name.startswith(f"{BUCKET}/meet/")}
    assert {verb for verb, _ in mine} == {"GetObject", "PutObject"}
    assert "POST" in {call.verb for call in calls}  # several objects are deleted with one call
    mine |= {("DeleteObject", name) for _, name in mine}
    assert [
        each for each in mine if not allows("role", f"s3:{each[0]}", f"arn:aws:s3:::{each[1]}")
    ] == []
    assert [each for each in sorted(needed) if not allows("launcher", *each)] == []


@pytest.mark.parametrize(
    ("name", "action", "key"),
    [
        ("launcher", "s3:DeleteObject", "meet/run-1/x"),
        ("launcher", "s3:GetObject", "meet/run-1/x"),
        ("launcher", "s3:DeleteObject", "runs/precious"),
        ("launcher", "s3:GetObject", "runs/diloco-run-1-00000/output/model/weights"),
        ("launcher", "s3:DeleteObject",
         "others/diloco-run-1-00000/output/model/diloco-outcome.json"),
        ("launcher", "s3:PutObject", "runs/diloco-run-1-00000/output/model/diloco-outcome.json"),
        ("role", "s3:GetObject", "others/x"),
        ("role", "s3:PutObject", "x"),
        ("role", "s3:DeleteObject", "runs/diloco-run-1-00000/output/model/diloco-outcome.json"),
        ("role", "s3:DeleteObject", "meeting/x"),
        ("role", "s3:PutObject", "runs-of-others/x"),
    ],
)  # fmt: skip
def test_what_others_keep_is_out_of_reach(name, action, key):
    assert not allows(name, action, f"arn:aws:s3:::{BUCKET}/{key}")


@pytest.mark.parametrize(
    "key", ["diloco-run-1-00000/output/model/x", "checkpoints/diloco-a-00000/x"]
)
def test_sagemaker_may_write_results_and_checkpoints_with_the_role(key):
    for action in ("s3:PutObject", "s3:GetObject"):
        assert allows("role", action, f"arn:aws:s3:::{BUCKET}/{PREFIX}/{key}")


def test_logs_of_other_jobs_are_out_of_reach():
    for action in ("logs:GetLogEvents", "logs:DeleteLogStream"):
        assert not allows("launcher", action, f"{GROUP}:log-stream:others/algo-1-1")


def test_they_are_of_no_partition():
    """China and GovCloud have ARNs of their own."""
    for name in ("launcher", "role"):
        text = (files("diloco_sagemaker") / f"{name}_policy.json").read_text(encoding="utf-8")
        assert "arn:aws" not in text
