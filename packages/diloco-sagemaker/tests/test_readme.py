"""The README is true."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diloco_protocol import Outcome
from diloco_protocol.backend import options_table
from diloco_sagemaker import SageMakerOptions

README = Path(__file__).parents[1] / "README.md"


def examples():
    """The programs of the README, by the name in their first line."""
    text = README.read_text(encoding="utf-8")
    return dict(re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.DOTALL))


@pytest.mark.processes
def test_the_try_without_an_account(tmp_path, monkeypatch):
    for name in ("my_program.py", "first_run.py"):
        (tmp_path / name).write_text(examples()[name])
    text = README.read_text(encoding="utf-8")
    (line,) = re.findall(r'^PYTHONPATH="\$PWD" diloco-localcloud (.*)$', text, re.MULTILINE)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    # What is installed for a user is on the path here.
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "diloco_localcloud", *line.split()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as stand_in:
        try:
            for _ in range(4):
                variable = stand_in.stdout.readline().removeprefix("export ").strip()
                monkeypatch.setenv(*variable.split("=", 1))
            done = subprocess.run(
                [sys.executable, "first_run.py"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            stand_in.terminate()
    assert done.stdout == printed, done.stderr


@pytest.mark.processes
def test_the_example(aws, tmp_path, monkeypatch):
    name = "launch.py"
    (tmp_path / name).write_text(examples()[name])
    for key, value in {
        "AWS_ENDPOINT_URL": aws.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_CONFIG_FILE": "/nowhere",
    }.items():
        monkeypatch.setenv(key, value)
    created, create = threading.Event(), aws.CreateTrainingJob

    def create_and_complete(body):
        answer = create(body)
        job = body["TrainingJobName"]
        text = Outcome(0, result={"rank": int(job[-5:])}).to_json().encode()
        # Of this moment: the example has a real clock, and SageMaker's is as good as any.
        aws.objects[f"/bucket/runs/{job}/output/model/diloco-outcome.json"] = text
        aws.objects[f"/runs/{job}/output/model/diloco-outcome.json"] = text
        aws.move(job, "Completed", "Completed")
        created.set()
        return answer

    aws.CreateTrainingJob = create_and_complete
    done = subprocess.run(
        [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    wanted = "0 succeeded {'rank': 0} None\n1 succeeded {'rank': 1} None\n"
    assert done.stdout == wanted, done.stderr


def test_it_says_what_was_not_seen():
    assert "never been run on AWS" in README.read_text(encoding="utf-8")


def test_the_table_of_options():
    table = README.read_text(encoding="utf-8").partition("<!-- options -->\n")[2]
    table = table.partition("\n<!-- /options -->")[0]
    assert table == options_table(SageMakerOptions), "print(options_table(SageMakerOptions)) is it"
