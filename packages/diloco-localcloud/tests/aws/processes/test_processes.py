"""Training jobs that are processes: what is below /opt/ml, how they end, and that none is left."""

from __future__ import annotations

import json
import os
import sys
import time
import types

import boto3
import pytest

from diloco_localcloud import SageMakerProcesses, StandInError

pytestmark = pytest.mark.processes

#: Seconds after which a test that waits for something real fails instead of hanging.
PATIENCE = 600.0
ROLE = "arn:aws:iam::123456789012:role/training"


class Lab:
    """Clients, and requests that run a program."""

    def __init__(self, stand_in, folder):
        self.stand_in, self.world, self.folder = stand_in, stand_in.world, folder
        self.api = boto3.client("sagemaker", **stand_in.client_options)
        self.logs = boto3.client("logs", **stand_in.client_options)
        self.s3 = boto3.client("s3", **stand_in.client_options)
        self.s3.create_bucket(Bucket="bucket")

    def run(self, program, name="job", **more):
        path = self.folder / f"{name}.py"
        path.write_text(program, encoding="utf-8")
        request = {
            "TrainingJobName": name,
            "RoleArn": ROLE,
            "AlgorithmSpecification": {
                "TrainingImage": "any:1",
                "TrainingInputMode": "File",
                "ContainerEntrypoint": [sys.executable, "-u"],
                "ContainerArguments": [str(path)],
            },
            "OutputDataConfig": {"S3OutputPath": "s3://bucket/out", "CompressionType": "NONE"},
            "ResourceConfig": {
                "InstanceType": "ml.m5.large",
                "InstanceCount": 1,
                "VolumeSizeInGB": 1,
            },
            "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
            **more,
        }
        self.api.create_training_job(**request)

    def describe(self, name="job"):
        return self.api.describe_training_job(TrainingJobName=name)

    def wait(self, condition):
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < deadline, "it did not come"
            time.sleep(0.02)
        return found

    def ended(self, name="job"):
        """Wait for the end of a job; what Describe tells then."""

        def over():
            told = self.describe(name)
            return told if told["TrainingJobStatus"] in {"Completed", "Failed", "Stopped"} else None

        return self.wait(over)

    def lines(self, name="job"):
        streams = self.logs.describe_log_streams(
            logGroupName="/aws/sagemaker/TrainingJobs", logStreamNamePrefix=f"{name}/"
        )["logStreams"]
        return [
            event["message"]
            for stream in streams
            for event in self.logs.get_log_events(
                logGroupName="/aws/sagemaker/TrainingJobs",
                logStreamName=stream["logStreamName"],
                startFromHead=True,
            )["events"]
        ]

    def object(self, key):
        return self.s3.get_object(Bucket="bucket", Key=key)["Body"].read()


@pytest.fixture
def lab(tmp_path):
    with SageMakerProcesses(kill_seconds=0.5) as stand_in:
        made = Lab(stand_in, tmp_path)
        yield made
        for client in (made.api, made.logs, made.s3):
            client.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_a_program_finds_and_what_it_leaves(lab):
    lab.s3.put_object(Bucket="bucket", Key="data/a/part", Body=b"one")
    lab.run(
        "import json, os\n"
        "root = os.environ['ROOT']\n"
        "print(json.load(open(root + '/input/config/hyperparameters.json')))\n"
        "print(json.load(open(root + '/input/config/resourceconfig.json'))['hosts'])\n"
        "print(open(root + '/input/data/train/part').read(), os.environ['TRAINING_JOB_NAME'])\n"
        "os.makedirs(root + '/model/deep')\n"
        "open(root + '/model/deep/file', 'w').write('made')\n"
        "print('the end', end='')\n",
        HyperParameters={"a": "1"},
        Environment={"ROOT": "/opt/ml"},
        InputDataConfig=[
            {
                "ChannelName": "train",
                "DataSource": {
                    "S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data/a"}
                },
            }
        ],
    )
    told = lab.ended()
    assert told["TrainingJobStatus"] == "Completed", told
    assert lab.lines() == ["{'a': '1'}", "['algo-1']", "one job", "the end"]
    assert lab.object("out/job/output/model/deep/file") == b"made"
    history = [entry["Status"] for entry in told["SecondaryStatusTransitions"]]
    assert history == ["Starting", "Downloading", "Training", "Uploading", "Completed"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit(3)", "AlgorithmError: , exit code: 3"),
        (
            (
                "import os, sys\n"
                "open(os.environ['ROOT'] + '/output/failure', 'w').write('no data')\n"
                "sys.exit(4)"
            ),
            "AlgorithmError: no data, exit code: 4",
        ),
        ("import os; os.kill(os.getpid(), 9)", "AlgorithmError: , exit code: 137"),
    ],
)
def test_a_failure_has_the_words_of_sagemaker(lab, program, reason):
    lab.run(program, Environment={"ROOT": "/opt/ml"})
    told = lab.ended()
    assert (told["TrainingJobStatus"], told["FailureReason"]) == ("Failed", reason)


def test_a_long_reason_is_cut(lab):
    lab.run(
        (
            "import os, sys\n"
            "open(os.environ['ROOT'] + '/output/failure', 'w').write('x' * 5000)\n"
            "sys.exit(4)"
        ),
        Environment={"ROOT": "/opt/ml"},
    )
    reason = lab.ended()["FailureReason"]
    assert len(reason) == 1024
    assert reason.endswith("xx, exit code: 4")


def test_what_cannot_be_started_has_failed(lab):
    algorithm = {
        "TrainingImage": "any:1",
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["/no/such/program"],
    }
    lab.run("", AlgorithmSpecification=algorithm)
    told = lab.ended()
    assert told["TrainingJobStatus"] == "Failed"
    assert "could not be started" in told["FailureReason"]


STUBBORN = (
    "import os, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: print('told to end', flush=True))\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
    "start_new_session=True)\n"
    "print('up', os.getpid(), child.pid, flush=True)\n"
    "while True: time.sleep(0.1)\n"
)


def up(lab, name="job"):
    """Wait until the stubborn program runs; its pid, and its child's outside its process group."""

    def said():
        try:
            lines = lab.lines(name)
        except lab.logs.exceptions.ResourceNotFoundException:
            return None
        return lines[-1].split() if lines and lines[-1].startswith("up") else None

    _, pid, child = lab.wait(said)
    return int(pid), int(child)


def test_a_stop_ends_every_process_of_a_job(lab):
    lab.run(STUBBORN)
    pids = up(lab)
    lab.api.stop_training_job(TrainingJobName="job")
    assert lab.describe()["TrainingJobStatus"] == "Stopping"
    told = lab.ended()
    assert (told["TrainingJobStatus"], told["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert lab.lines()[-1] == "told to end"
    assert not any(alive(pid) for pid in pids)


def test_a_job_that_runs_for_too_long_is_ended(lab):
    lab.run(STUBBORN, StoppingCondition={"MaxRuntimeInSeconds": 1})
    told = lab.ended()
    assert (told["TrainingJobStatus"], told["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")


def test_an_interrupted_job_goes_on_with_its_checkpoints(lab):
    lab.run(
        "import os, sys, time\n"
        "mark = os.environ['ROOT'] + '/checkpoints/step'\n"
        "if os.path.exists(mark):\n"
        "    print('again from', open(mark).read())\n"
        "    sys.exit(0)\n"
        "open(mark, 'w').write('7')\n"
        "print('up', os.getpid(), os.getpid(), flush=True)\n"
        "time.sleep(600)\n",
        Environment={"ROOT": "/opt/ml"},
        EnableManagedSpotTraining=True,
        StoppingCondition={"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
        CheckpointConfig={"S3Uri": "s3://bucket/checkpoints/job"},
    )
    pid, _ = up(lab)
    lab.world.job("job").interrupt()
    told = lab.ended()
    assert told["TrainingJobStatus"] == "Completed", told
    assert not alive(pid)
    assert lab.lines()[-1] == "again from 7"
    assert lab.object("checkpoints/job/step") == b"7"
    history = [entry["Status"] for entry in told["SecondaryStatusTransitions"]]
    assert history.count("Interrupted") == 1


def test_a_job_that_is_stopped_while_it_is_being_interrupted_stays_stopped(lab):
    lab.run(
        STUBBORN,
        EnableManagedSpotTraining=True,
        StoppingCondition={"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
    )
    pids = up(lab)
    lab.world.job("job").interrupt()
    lab.api.stop_training_job(TrainingJobName="job")
    assert lab.ended()["TrainingJobStatus"] == "Stopped"
    lab.wait(lambda: not any(alive(pid) for pid in pids))


def test_programs_find_the_store_of_their_launcher(lab):
    lab.run(
        "import boto3\n"
        "boto3.client('s3').put_object(Bucket='bucket', Key='from-inside', Body=b'here')\n"
    )
    assert lab.ended()["TrainingJobStatus"] == "Completed"
    assert lab.object("from-inside") == b"here"


def test_nothing_is_left_when_the_stand_in_stops_or_dies(lab):
    lab.run(STUBBORN)
    pids = up(lab)
    lab.stand_in.stop()
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(StandInError, match="make a new one"):
        lab.stand_in.start()


def test_a_name_that_lives_again_is_another_job(lab):
    """It has a folder of its own, with nothing of the job before it."""
    program = (
        "import os\n"
        "place = os.environ['ROOT'] + '/output/mark'\n"
        "print(os.path.exists(place))\n"
        "open(place, 'w').write('here')\n"
    )
    for _ in range(2):
        lab.run(program, Environment={"ROOT": "/opt/ml"})
        assert lab.ended()["TrainingJobStatus"] == "Completed"
        lab.api.delete_training_job(TrainingJobName="job")
    assert lab.lines() == ["False", "False"]


def test_lines_of_the_two_streams_are_not_mixed(lab):
    lab.run(
        "import os\n"
        "os.write(1, b'out 1\\nout ')\n"
        "os.write(2, b'err 1\\nerr ')\n"
        "os.write(1, b'2\\n')\n"
        "os.write(2, b'2')\n"
    )
    lab.ended()
    assert sorted(lab.lines()) == ["err 1", "err 2", "out 1", "out 2"]


def test_seconds_below_zero_are_refused():
    with pytest.raises(StandInError, match="kill_seconds"):
        SageMakerProcesses(kill_seconds=-1.0)


def test_the_hyperparameters_are_text_to_the_program(lab):
    strings = {"DILOCO_X": json.dumps({"a": "é\n\"'"})}
    lab.run(
        "import json, os\n"
        "print(json.load(open(os.environ['R'] + '/input/config/hyperparameters.json')) == "
        f"{strings!r})",
        HyperParameters=strings,
        Environment={"R": "/opt/ml"},
    )
    lab.ended()
    assert lab.lines() == ["True"]


def test_a_program_that_cannot_be_started_ends_its_job(lab, monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("diloco_localcloud._aws._processes._machines.Container", refused)
    lab.run("")
    told = lab.ended()
    assert told["TrainingJobStatus"] == "Failed"
    assert "could not be started: can't start new thread" in told["FailureReason"]


def test_descriptors_that_cannot_be_closed_hide_no_process(lab, monkeypatch):
    """A process without a record would outlive the stand-in."""
    close = os.close

    def closed_and_refused(descriptor):
        close(descriptor)
        raise OSError(9, "Bad file descriptor")

    with monkeypatch.context() as patch:
        refusing = types.SimpleNamespace(**{**vars(os), "close": closed_and_refused})
        patch.setattr("diloco_localcloud._server._container.os", refusing)
        lab.run("import time; time.sleep(600)")
        lab.wait(lambda: lab.stand_in.pid("job"))
    lab.api.stop_training_job(TrainingJobName="job")
    assert lab.ended()["TrainingJobStatus"] == "Stopped"
    assert lab.stand_in.pid("job") is None
