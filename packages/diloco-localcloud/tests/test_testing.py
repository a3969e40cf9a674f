"""The plugin of pytest, in a run of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

TEST = """
from diloco_localcloud import KubernetesProcesses, KubernetesStandIn


def test_delays(kubernetes_stand_in):
    assert KubernetesStandIn(strict_timing=0)._cluster.delays._random is None
    for each in (KubernetesStandIn(), KubernetesProcesses(), kubernetes_stand_in):
        assert (each._cluster.delays._random is not None) is {strict}
"""


@pytest.mark.processes
@pytest.mark.parametrize(("options", "strict"), [([], False), (["--strict-timing=7"], True)])
def test_strict_timing_is_an_option(tmp_path, options, strict):
    (tmp_path / "test_it.py").write_text(TEST.format(strict=strict))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "diloco_localcloud.testing", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
