"""SIGTERM inside the block: what was learned is saved, and the exit code is no success."""

import contextlib
import os
import signal
import threading
import time

import keys_lab
import pytest
import torch
from loop_lab import at_once, loop
from torch import nn

from diloco_core import Timing, connect, in_process
from diloco_core._loop._inner_loop import TrainingProcess

STEPS = 7


@pytest.fixture(autouse=True)
def nobody_handles_it():
    """As in a program that has no handler of its own; the test runner may have one."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def tell():
    os.kill(os.getpid(), signal.SIGTERM)


def learn(model, number):
    model.zero_grad()
    model(torch.arange(3.0) + number).square().sum().backward()


def train(exchange, steps, at=None, *, act=tell, taken=bool, **options):
    """Train alone until ``steps`` inner steps are taken; return the model's values and the loop."""
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    _, _, outer, _ = loop(exchange, model, inner, **options)
    with outer:
        while outer.inner_steps < steps:
            number = outer.inner_steps
            taken(number)
            learn(model, number)
            if number == at:
                act()
            inner.step()
    return [parameter.detach().clone() for parameter in model.parameters()], outer


def alone(path=None, **options):
    if path is None:
        return in_process(1)[0]
    return connect(f"file://{path}", rank=0, world_size=1, run_id="r", **options)


def ended(*arguments, **options):
    with pytest.raises(SystemExit) as caught:
        train(*arguments, **options)
    assert caught.value.code == 143


@pytest.mark.sampled
@pytest.mark.parametrize("at", range(STEPS))
def test_with_a_sync_under_way_nothing_that_it_counts_is_learned_twice(tmp_path, at):
    """The sync may or may not have been adopted when the replica ended."""
    steps = []
    options = {"sync_every": 4, "delay": 2, "alpha": 0.5, "taken": steps.append}
    ended(alone(tmp_path), STEPS, at, **options)
    assert steps == list(range(at + 1))
    _, outer = train(alone(tmp_path, resume=True), STEPS, **options)
    assert steps == list(range(STEPS))
    assert outer.inner_steps == STEPS


def test_a_result_that_is_there_already_is_adopted_before_it_ends(tmp_path):
    reports, timing = [], Timing(in_background=at_once)
    options = {"sync_every": 4, "delay": 2, "on_sync": reports.append}
    ended(alone(tmp_path, timing=timing), STEPS, 2, **options)
    assert [report.total_inner_steps for report in reports] == [3]


@pytest.mark.sampled
@pytest.mark.parametrize("at", [0, 2, 3, 4])
def test_a_fixed_run_goes_on_with_the_step_in_which_it_was_told(tmp_path, caplog, at):
    """A sync that is due then comes after the next step: the others may be gone."""
    whole, _ = train(alone(tmp_path / "whole"), STEPS)
    ended(alone(tmp_path / "run"), STEPS, at)
    assert f"told to end (SIGTERM) after inner step {at + 1}" in caplog.text
    resumed, outer = train(alone(tmp_path / "run", resume=True), STEPS)
    assert outer.inner_steps == STEPS
    assert at == 3 or all(map(torch.equal, resumed, whole))


@pytest.mark.sampled
@pytest.mark.parametrize("sync_every", [2, 50])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("idle", [False, True], ids=["both step", "one never steps"])
def test_a_step_that_several_optimizers_take_is_not_cut(tmp_path, at, sync_every, idle):
    """If one never steps, a step ends where a sync comes, or where the other one steps again."""

    def trained(folder, at=None, **options):
        torch.manual_seed(3)
        model, taken = nn.Linear(3, 2), 0
        optimizers = [torch.optim.AdamW([parameter], lr=0.1) for parameter in model.parameters()]
        exchange = alone(folder, **options)
        _, _, outer, _ = loop(exchange, model, optimizers, sync_every=sync_every)
        try:
            with outer:
                begun = outer.inner_steps
                for number in range(begun, STEPS):
                    learn(model, number)
                    if number == at:
                        tell()
                    for optimizer in optimizers[: 1 if idle else 2]:
                        optimizer.step()
                    taken = number + 1
        except SystemExit as end:
            return end.code, taken
        return begun, *(parameter.detach().clone() for parameter in model.parameters())

    _, *whole = trained(tmp_path / "whole")
    assert trained(tmp_path / "run", at) in {(143, at), (143, at + 1)}
    begun, *resumed = trained(tmp_path / "run", resume=True)
    assert begun in ({at, at + 1} if idle else {at + 1})
    was_due = begun % sync_every == 0  # that sync comes one step later in the resumed run
    assert was_due or all(map(torch.equal, resumed, whole))


def test_what_cannot_be_saved_does_not_keep_it(tmp_path, caplog):
    class Loader:
        def state_dict(self):
            return {"position": object() if broken else 1}

        def load_state_dict(self, state):
            pass

    def act():
        broken.append(1)
        tell()

    broken = []
    ended(alone(tmp_path), 9, 2, act=act, sync_every=5, stateful={"loader": Loader()})
    assert "the inner state was not saved: stateful.loader['position'] is an object" in caplog.text


def test_the_signal_is_left_to_others_afterwards():
    train(alone(), 3)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    ended(alone(), 3, 1)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_the_programs_stays():
    """Also one that it sets inside the block."""
    heard, inside = [], lambda number, frame: None
    handler = lambda number, frame: heard.append(number)  # noqa: E731
    signal.signal(signal.SIGTERM, handler)
    assert train(alone(), 3, 1)[1].inner_steps == 3
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    train(alone(), 3, 1, act=lambda: signal.signal(signal.SIGTERM, inside))
    assert signal.getsignal(signal.SIGTERM) is inside


def test_another_thread_handles_nothing():
    seen = []
    act = lambda: seen.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
    thread = threading.Thread(target=train, args=(alone(), 3, 1), kwargs={"act": act})
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


def test_a_second_signal_does_not_wait():
    reached = []

    def act():
        tell()
        reached.append("after the first")
        tell()
        reached.append("after the second")

    ended(alone(), 3, 1, act=act)
    assert reached == ["after the first"]


@pytest.mark.parametrize("steps", [4, 3], ids=["in a sync", "in that of the end"])
def test_in_a_sync_it_leaves_at_once_and_tells_the_others(tmp_path, steps):
    reports = []

    def on_sync(report):
        reports.append(report)
        if len(reports) == 2:  # of three steps, the second sync is that of a partial period
            tell()

    ended(alone(tmp_path), steps, on_sync=on_sync)
    assert '"failed"' in (tmp_path / keys_lab.note_key(3, 0)).read_text()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_child_that_was_forked_ends_as_ever():
    ends = []

    def act():
        ready, begun = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(begun, b"!")  # Python forgets signals that come while it forks
            for _ in range(3000):  # it is told to end at once
                time.sleep(0.01)
            os._exit(7)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        os.close(ready)
        os.close(begun)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert train(alone(), 3, 1, act=act)[1].inner_steps == 3
    assert ends == [-signal.SIGTERM]


def test_where_the_same_signal_may_come_twice_only_a_later_one_ends_it_at_once():
    now = 0.0
    process = TrainingProcess(same_for=5.0, clock=lambda: now)
    process.training = True
    for now in (0.0, 0.1, 4.9):  # noqa: B007 - the clock reads it
        process._heard(signal.SIGTERM, None)
    assert process.told_to_end
    now = 5.0
    with pytest.raises(SystemExit):
        process._heard(signal.SIGTERM, None)


@pytest.mark.parametrize("training", [True, False])
def test_another_thread_ends_the_block_by_an_error_only_between_steps(training):
    process = TrainingProcess()
    process.watch()
    try:
        process.training = training
        with pytest.raises(ConnectionError) if not training else contextlib.nullcontext():
            process.interrupt(ConnectionError("a process has failed"))
            time.sleep(0.01)  # Python handles signals
        assert not process.told_to_end, "nobody has told it"
    finally:
        process.stop()
    process.interrupt(ConnectionError("it would end this process"))


@pytest.mark.parametrize("ends", [True, False])
def test_an_error_that_comes_late_leaves_what_goes_on_alone(ends):
    process = TrainingProcess()
    process.error = ConnectionError("a process has failed")
    process.training = not ends
    try:
        raise KeyboardInterrupt if ends else ValueError
    except (KeyboardInterrupt, ValueError):
        process._heard(signal.SIGTERM, None)
    assert process.error is None, "it may be tried again"
