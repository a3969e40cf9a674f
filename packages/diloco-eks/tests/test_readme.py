"""The example in the README is run as it stands."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example(bench, report, tmp_path):
    ((name, text),) = re.findall(
        r"```python\n# (\S+)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / name).write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", name],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "KUBECONFIG": str(bench.kubeconfig),
            "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry),  # noqa: PTH100
        },
    )
    try:
        while process.poll() is None:
            bench.world.advance(1)
            for pod in bench.world.pods():
                if pod.alive:
                    pod.succeed(report({"rank": pod.index})[0])
                elif pod.json["status"]["phase"] == "Pending":
                    pod.start()
            time.sleep(0.05)
    finally:
        process.kill()
        output, errors = process.communicate()
    findings = "True cluster\nTrue rights\nTrue rights\nTrue rights\nTrue manifest\nTrue quota\n"
    assert output == findings + "0 succeeded {'rank': 0}\n1 succeeded {'rank': 1}\n", errors
    assert process.returncode == 0
