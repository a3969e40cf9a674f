"""Names of signals, and the exit codes that go with them."""

import os
import signal
import subprocess
import sys

import pytest

from diloco_protocol._processes import is_signal_name
from diloco_protocol.backend import read_wait_status, signal_name


def test_signals_have_their_names():
    assert signal_name(9) == "SIGKILL"
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert signal_name(10_000) == "signal 10000"
    assert read_wait_status(40) == (168, "signal 40"), "a real-time signal"


@pytest.mark.parametrize("code", [0, 1, 127, 128, 255])
def test_an_exit_has_its_code_and_no_signal(code):
    assert read_wait_status(code << 8) == (code, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_has_the_code_of_shells(number):
    assert read_wait_status(int(number)) == (128 + number, number.name)
    assert read_wait_status(int(number) | 0x80) == (128 + number, number.name), "with a core dump"


@pytest.mark.processes
def test_it_agrees_with_a_real_process():
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    _, status = os.waitpid(process.pid, 0)
    process.returncode = -9
    assert read_wait_status(status) == (137, "SIGKILL")


@pytest.mark.parametrize("number", range(1, 65))
def test_every_name_that_is_given_is_the_name_of_a_signal(number):
    assert is_signal_name(signal_name(number))


@pytest.mark.parametrize("text", ["", "5", "SIG", "sigkill", "SIGKILL\n", "signal 0", "signal 128"])
def test_other_text_is_not(text):
    assert not is_signal_name(text)
