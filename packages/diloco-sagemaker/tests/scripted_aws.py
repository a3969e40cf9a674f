"""The standard suite's world for SageMaker: a stand-in over HTTP, whose jobs the suite moves."""

import functools
import json
import math
from dataclasses import replace
from signal import Signals

import boto3
import botocore.session
from aws_truth import attempt_of, of_handle, resources_of, truth_of

from diloco_conformance import Ability, Fault, Harness, Operation, Step, Told
from diloco_localcloud import SageMakerStandIn
from diloco_protocol import (
    Outcome,
    Reason,
    environment,
    outcome_to_message,
    spec_from_environment,
)
from diloco_protocol.backend import variables_from_strings
from diloco_sagemaker import SageMakerExecutor

BUCKET, PREFIX = "bucket", "runs"
OPTIONS = {
    "role_arn": "arn:aws:iam::123456789012:role/trainer",
    "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer:1",
    "output_s3_path": f"s3://{BUCKET}/{PREFIX}",
}
FAULTS = {
    Fault.THROTTLE: "throttle",
    Fault.SERVER_ERROR: "server_error",
    Fault.CUT: "cut",
    Fault.FORBIDDEN: "forbidden",
}
CALLS = {
    Operation.LAUNCH: [("CreateTrainingJob", "sagemaker")],
    Operation.OBSERVE: [
        ("DescribeTrainingJob", "sagemaker"),
        ("ListTrainingJobs", "sagemaker"),
        ("Search", "sagemaker"),
        ("ListTags", "sagemaker"),
        ("GetObject", "s3"),
    ],
    Operation.CANCEL: [("StopTrainingJob", "sagemaker")],
    Operation.LOGS: [("DescribeLogStreams", "logs"), ("GetLogEvents", "logs")],
    Operation.PURGE: [
        ("DeleteTrainingJob", "sagemaker"),
        ("DeleteLogStream", "logs"),
        ("DeleteObject", "s3"),
    ],
}
NO_MEMORY = (
    "ClientError: Please use an instance type with more memory, or reduce the size of job data "
    "processed on an instance."
)


def unnamed(request):
    """A request without the id of its launch, which a plan does not know yet."""
    return {**request, "HyperParameters": {**request["HyperParameters"], "DILOCO_LAUNCH": ""}}


class AWSHarness(Harness):
    """Training jobs on a stand-in; the runner's part (timeouts, outcomes) is played here."""

    entrypoint = "trainer:train"
    gpus = ("L4", "H100:8", "A10G:4")
    cannot = {
        Fault.REFUSED: "the stand-in would have to be stopped; a cut connection is what it has",
        Fault.CONFLICT: "nothing that the executor changes has a version that could conflict",
        Ability.SECRETS: "SageMaker hands no secrets to training jobs",
        Ability.RESTART: (
            "a restart in the same job is in its records only when it has ended; test_lives.py has "
            "these"
        ),
        Ability.RACE: (
            "whatever the program of a job does that is being stopped, the job ends as stopped"
        ),
    }

    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.stand_in = self.start_stand_in()
        self.world = self.stand_in.world
        self.s3 = self.client("s3")
        self.s3.create_bucket(Bucket=BUCKET)
        self.others = []
        self.deadlines = {}
        self.strangers = set()
        self.begun = {}
        self.change = None

    @functools.cached_property
    def api(self):
        return self.client("sagemaker")

    def start_stand_in(self):
        return SageMakerStandIn().start()

    def client(self, service):
        return boto3.client(service, **self.stand_in.client_options)

    def make_executor(self, **options):
        return self.executor_of(self.stand_in, {**self.options, **options})

    def executor_of(self, stand_in, options):
        known = stand_in.client_options
        core = botocore.session.Session()
        core.register("provide-client-params.sagemaker.ListTrainingJobs", self.small_page)
        core.register("after-call.sagemaker.ListTrainingJobs", self.listed)
        session = boto3.Session(
            known["aws_access_key_id"],
            known["aws_secret_access_key"],
            region_name=known["region_name"],
            botocore_session=core,
        )
        return SageMakerExecutor(
            **{
                **OPTIONS,
                "endpoint_url": stand_in.url,
                "backoff": self.backoff(),
                "clock": self.clock,
                "log_delay": 0.0,  # no time passes while a follower waits
                **options,
            },
            session=session,
        )

    # --- the clock ---

    def clock(self):
        return self.world.now()

    def sleep(self, seconds):
        limit = self.time.limit
        if limit is not None and self.clock() > limit:
            self.time.limit = 0
            self.time.sleep(seconds)  # raises
        if not self.time.idle():
            self.advance(seconds)

    def now(self):
        return self.clock()

    def age(self, seconds):
        self.advance(seconds)

    def advance(self, seconds):
        self.world.advance(seconds)
        self.time_out()

    def time_out(self):
        """What the runners do: end what is overdue."""
        for key, deadline in list(self.deadlines.items()):
            if self.clock() > deadline:
                del self.deadlines[key]
                job = self.job(key[0])
                if job is not None and job.json["CreationTime"] == key[1]:
                    outcome = Outcome(143, error="the timeout passed", reason=Reason.TIMEOUT)
                    job.fail(143, outcome_to_message(outcome)[0])

    def settle(self):
        self.world.settle(within=130.0)

    # --- jobs ---

    def job(self, name):
        try:
            return self.world.job(name)
        except LookupError:
            return None

    def of(self, handle):
        """The job of a handle that exists."""
        return self.world.job(handle.metadata["job_name"])

    def key(self, handle):
        return handle.metadata["job_name"], self.of(handle).json["CreationTime"]

    # --- the hand ---

    def drive(self, handle, step, value=None):
        job = self.of(handle)
        if step not in {Step.START, Step.PRINT}:
            self.flush(handle)
        if step is Step.PRINT:
            self.write(handle, "".join(f"{line}\n" for line in value).encode())
            return
        if step is Step.START:
            job.start()
            timeout = self.spec(handle).timeout
            self.deadlines[self.key(handle)] = self.clock() + (
                math.inf if timeout is None else timeout
            )
            return
        self.deadlines.pop(self.key(handle), None)
        if step is Step.SUCCEED:
            self.succeed(handle, job, value)
        elif step is Step.FAIL:
            self.fail(job, Outcome(value, error=f"exit code {value}", reason=Reason.ERROR))
        elif step is Step.KILL:
            code = 128 + Signals[value]
            self.fail(job, Outcome(code, value, error=f"ended by {value}", reason=Reason.ERROR))
        elif step is Step.OOM:
            job.break_down(NO_MEMORY)  # the kernel kills the whole container, the runner included
        elif step is Step.PREEMPT:
            job.interrupt()
        elif step is Step.STOP:
            job.stop()
        self.world.settle(within=130.0 if step is Step.STOP else 2.0)

    def succeed(self, handle, job, value):
        size, most = len(json.dumps(value)), SageMakerExecutor.capabilities.max_result_bytes
        if size > most:
            # As the runner does.
            self.fail(
                job,
                Outcome(
                    1,
                    error=f"the result has {size} bytes of JSON, and {most} are allowed",
                    reason=Reason.ERROR,
                ),
            )
            return
        attempt = attempt_of(job.json)
        content = Outcome(0, result=value, reason=Reason.COMPLETED, attempt=attempt).to_json()
        self.s3.put_object(Bucket=BUCKET, Key=self.result_key(handle), Body=content.encode())
        job.succeed()

    @staticmethod
    def fail(job, outcome):
        outcome = replace(outcome, attempt=attempt_of(job.json))
        job.fail(outcome.exit_code, outcome_to_message(outcome)[0])

    @staticmethod
    def result_key(handle):
        return f"{PREFIX}/{handle.metadata['job_name']}/output/model/diloco-outcome.json"

    def write(self, handle, data, stream="stdout"):
        """Whole lines reach the log, from each stream on its own."""
        place = (*self.key(handle), stream)
        lines, newline, rest = (self.begun.pop(place, b"") + data).rpartition(b"\n")
        if newline:
            self.of(handle).log((lines + newline).decode(errors="replace"))
        self.begun[place] = rest

    def flush(self, handle):
        """What was begun is a line when nobody writes any more."""
        for stream in ("stdout", "stderr"):
            if rest := self.begun.pop((*self.key(handle), stream), b""):
                self.of(handle).log(rest.decode(errors="replace"))

    def lose(self, handle, left=None):
        if left is None:
            self.s3.delete_object(Bucket=BUCKET, Key=self.result_key(handle))
        else:
            self.s3.put_object(Bucket=BUCKET, Key=self.result_key(handle), Body=left)

    def expire(self, handles):
        for handle in handles:
            self.api.delete_training_job(TrainingJobName=handle.metadata["job_name"])

    def remove(self, handle):
        """As somebody does with the console, which shows the jobs as Deleting for a while."""
        run = handle.metadata["job_name"][:-5]
        self.world.habits.delete_seconds = 5.0
        for job in self.world.jobs(run):
            self.api.delete_training_job(TrainingJobName=job.name)
        self.world.habits.delete_seconds = 0.0

    def between(self, action):
        self.change = action

    def small_page(self, params, **details):
        """As if there were as many runs as a page of AWS's can hold."""
        return params if self.change is None else {**params, "MaxResults": 5}

    def listed(self, **details):
        change, self.change = self.change, None
        if change is not None:
            change()

    def foreign(self, name):
        self.strangers.add(f"diloco-{name}-00000")
        self.api.create_training_job(
            TrainingJobName=f"diloco-{name}-00000",
            RoleArn=OPTIONS["role_arn"],
            AlgorithmSpecification={"TrainingImage": "any:1", "TrainingInputMode": "File"},
            OutputDataConfig={"S3OutputPath": "s3://bucket/other"},
            ResourceConfig={
                "InstanceType": "ml.m5.large",
                "InstanceCount": 1,
                "VolumeSizeInGB": 1,
            },
            StoppingCondition={"MaxRuntimeInSeconds": 3600},
        )

    def elsewhere(self):
        self.others.append(SageMakerStandIn(account="210987654321").start())
        return self.executor_of(self.others[-1], {})

    # --- what is known ---

    def spec(self, handle):
        told = self.of(handle).json
        spec = spec_from_environment(told["HyperParameters"])
        return replace(spec, attempt=attempt_of(told))

    def told(self, handle):
        spec = self.spec(handle)
        told = self.of(handle).json
        variables = {
            **told.get("Environment", {}),
            **variables_from_strings(told["HyperParameters"]),
            **environment(spec),
        }
        return Told(spec.rank, spec.world_size, spec.kwargs, variables, spec.timeout)

    def labels(self, handle):
        arn = self.of(handle).json["TrainingJobArn"]
        return {tag["Key"]: tag["Value"] for tag in self.api.list_tags(ResourceArn=arn)["Tags"]}

    def resources(self, handle):
        return resources_of(self.of(handle).json)

    def truth(self, handle):
        job = self.job(handle.metadata["job_name"])
        return truth_of(of_handle(None if job is None else job.json, handle))

    def living(self):
        jobs = [job for job in self.world.jobs() if job.name not in self.strangers]
        return sum(job.status[0] in {"InProgress", "Stopping"} for job in jobs)

    def sent(self):
        """In rank order within a launch, which creates several jobs at the same time."""
        region = self.stand_in._region
        with region.lock:
            ours = [unnamed(job.request) for job in region.lives if job.name not in self.strangers]
        launches = {}
        for request in ours:
            name = request["TrainingJobName"]
            launches.setdefault(name.rpartition("-")[0], []).append(request)
        return [
            request
            for of_launch in launches.values()
            for request in sorted(of_launch, key=lambda request: request["TrainingJobName"])
        ]

    # --- faults ---

    def inject(self, operation, fault, *, after=0):
        if fault in {Fault.AMBIGUOUS, Fault.UNANSWERED}:
            times = 1 if fault is Fault.AMBIGUOUS else None
            self.stand_in.faults.add(
                "ambiguous",
                verb="CreateTrainingJob",
                resource="sagemaker",
                times=times,
                after=after,
            )
            return
        for verb, resource in CALLS[operation]:
            self.stand_in.faults.add(
                FAULTS[fault], verb=verb, resource=resource, times=None, after=after
            )

    def clear(self):
        self.stand_in.faults.clear()

    def calls(self):
        return len(self.stand_in.calls)

    def close(self):
        for stand_in in (self.stand_in, *self.others):
            stand_in.stop()


class SpotHarness(AWSHarness):
    """The same on spot."""

    def __init__(self):
        super().__init__(spot=True)


class OnDemandHarness(AWSHarness):
    """The same on demand."""

    cannot = {**AWSHarness.cannot, Step.PREEMPT: "on demand nobody takes an instance away"}
