"""What several of these tests share: the harness of ``hatch run bench-scale``."""

import importlib
import signal
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest

# For the modules that several of them share.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "packages/diloco-core/tests/labs"))

MODULES = (
    "cohort", "command", "driver", "figures", "network", "page", "s3", "scaling", "table",
    "virtual_time", "weights",
)  # fmt: skip


def pytest_configure():
    # As in packages/conftest.py, which says why.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(scope="session")
def scale():
    """The modules of the harness; ``measured`` gives a steady sync's figures, counted only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "tools/bench")
        modules = SimpleNamespace(
            **{name: importlib.import_module(f"scale.{name}") for name in MODULES}
        )
    modules.compared = partial(compared, modules)
    modules.measured = lambda *run, **options: compared(modules, *run, **options)[0]
    modules.compare = cache(modules.compared)
    modules.measure = lambda *run, **options: modules.compare(*run, **options)[0]
    return modules


def compared(scale, kind, replicas, parameters=1e6, **options):
    """The figures of a steady sync, and what was planned."""
    options = {
        "warm": 1 if kind == "gather" else 2,
        "measured": 4 if kind == "gather" else 1,
        "tensors": 4,
        **options,
    }
    run = scale.cohort.Run(kind, parameters, replicas, **options)
    outcome = scale.cohort.simulate(run)
    return scale.figures.sync_of(run, outcome), scale.figures.plan_of(run, outcome.parameters)


@pytest.fixture(autouse=True)
def no_session_of_another_test(monkeypatch):
    """Let boto3 read the credentials of this test: it keeps the first ones that it has read."""
    if (boto3 := sys.modules.get("boto3")) is not None:
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)


@pytest.fixture
def s3(monkeypatch):
    """A bucket of a stand-in for S3; the variables that lead to it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield variables
    server.stop()
