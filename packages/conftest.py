"""Shared by the tests of all packages: other cases on request, and how to run a failure again."""

import gc
import os
import shlex
import signal
import zlib
from collections import defaultdict

import pytest
from hypothesis import settings

# Before torch is imported: several tests run at a time, and threads of theirs only wait for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def hear_signals():
    """Let processes that tests start be interrupted, however the tests were started.

    What a shell starts in the background, or with nohup, ignores some signals, and so does
    everything below it: tests that interrupt a replica would wait for ever. A handler that does
    nothing is as good as ignoring, and is not inherited.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_addoption(parser):
    parser.addoption(
        "--seed",
        type=int,
        metavar="N",
        help="tests that draw their cases draw others than usual, and the same ones for the same N",
    )


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its own options
def pytest_configure(config):
    hear_signals()
    # What every change waits for draws fewer examples; `hatch run slow` draws all.
    settings.register_profile("full", settings.get_profile("ci"))
    settings.register_profile("ci", settings.get_profile("ci"), max_examples=20)
    if config.option.seed is not None:
        settings.register_profile("seeded", settings.get_profile("full"), derandomize=False)
        config.option.hypothesis_profile = "seeded"
        config.option.hypothesis_seed = str(config.option.seed)


@pytest.hookimpl(tryfirst=True)  # before the slow ones are left out
def pytest_collection_modifyitems(items):
    """Mark three quarters of the cases of a test that is ``sampled`` as slow: always the same.

    They are chosen by their names, so that a quarter holds some of each parameter's values.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for alike in cases.values():
        alike.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in alike[-(-len(alike) // 4) :]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """The command that runs a failed test again, with the cases that it has drawn."""
    report = yield
    if report.failed:
        words = ["hatch", "run", "one", item.nodeid]
        if item.get_closest_marker("slow"):
            words += ["-m", "slow"]
        if item.config.option.seed is not None:
            words += ["--seed", str(item.config.option.seed)]
        report.sections.append(("to run it again", shlex.join(words)))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Let nothing be looked for that could be freed while all tests are collected: nothing can."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
