"""One exchange carries one outer loop, in the process that has entered it."""

import multiprocessing
import os

import pytest
import torch

from diloco_core import ConfigurationError, SyncError, connect, in_process


class TestTwoLoops:
    def test_at_the_same_time_are_refused(self, lab):
        """Models that look alike would be taken for each other where another replica steps them in
        another order.
        """
        (exchange,) = in_process(1)
        outer, inner = lab.outer_loop(lab.small_model(), exchange)
        with outer:
            with pytest.raises(
                ConfigurationError, match="this exchange is in use by another outer loop"
            ):
                lab.outer_loop(lab.small_model(seed=1), exchange)
            lab.small_step(lab.small_model(), inner)

    def test_made_together_only_the_first_is_entered(self, lab):
        (exchange,) = in_process(1)
        outer, _ = lab.outer_loop(lab.small_model(), exchange)
        other, _ = lab.outer_loop(lab.small_model(seed=1), exchange)
        with outer, pytest.raises(ConfigurationError, match="connect to another prefix"):
            other.__enter__()

    def test_over_one_prefix_are_refused_too(self, lab, tmp_path):
        first = connect(str(tmp_path), rank=0, world_size=1)
        outer, _ = lab.outer_loop(lab.small_model(), first)
        with outer, pytest.raises(ConfigurationError, match="returns the same exchange"):
            lab.outer_loop(lab.small_model(seed=1), connect(str(tmp_path), rank=0, world_size=1))


def in_child(outer, net, inner, act, answers):
    try:
        if act == "step":
            # Without a backward pass, which torch refuses after a fork where there is a GPU
            inner.step()
        elif act == "leave":
            outer.__exit__(None, None, None)
        elif act == "flush":
            outer.flush()
        elif act == "state":
            outer.state_dict()
        else:
            error = SystemExit(0)
            outer.__exit__(type(error), error, None)
        answers.send("nothing")
    except BaseException as error:
        answers.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def lab_step(net, inner):
    net(torch.ones(5, 3)).pow(2).sum().backward()
    inner.step()


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this platform"
)
@pytest.mark.parametrize("min_replicas", [None, 1])
@pytest.mark.parametrize("act", ["step", "leave", "flush", "state", "exit"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_does_nothing_in_the_name_of_its_parent(lab, tmp_path, act, min_replicas):
    """On a folder, where nothing else would keep it from that."""
    net = lab.small_model()
    exchange = connect(str(tmp_path), rank=0, world_size=1, min_replicas=min_replicas)
    outer, inner = lab.outer_loop(net, exchange, sync_every=3)  # the child's step makes none due
    with outer:
        lab_step(net, inner)
        before = sorted(path for path in tmp_path.rglob("*") if "beats" not in path.parts)
        answer, answers = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(
            target=in_child, args=(outer, net, inner, act, answers)
        )
        child.start()
        told = answer.recv()
        child.join()
        assert (
            told == "nothing"
            if act == "exit"
            else told.startswith(f"{SyncError.__name__}: this process")
        ), told
        assert sorted(path for path in tmp_path.rglob("*") if "beats" not in path.parts) == before
        for _ in range(2):
            lab_step(net, inner)
    assert outer.committed == 1
