"""Replicas under a manager that only averages: those that differ are refused, and say in what."""

import logging
import threading

import pytest
import torch
from torch import nn
from training_lab import PATIENCE

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    ManagerExchange,
    MismatchError,
    MockManager,
    in_process,
)
from diloco_core._torchft._exchange import Compared, first_difference, numbers
from diloco_core.testing import run_replicas

REPLICAS = 2


class Foreign:
    """A manager that is none of ours: it compares nothing, and brings states at the first step.

    It keeps the errors of averages to itself until the vote, as torchft's does.
    """

    _use_async_quorum = False

    def __init__(self, exchange, hub=None, refused=()):
        self.inner = MockManager(exchange)
        self.rank, self.hub, self.refused, self.votes = exchange.rank, hub, refused, 0
        self.load = self.state = None
        self.broken = False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def register_state_dict_fn(self, key, load_state_dict, state_dict):
        self.load, self.state = load_state_dict, state_dict

    def start_quorum(self):
        self.inner.start_quorum()
        if self.hub is not None and self.current_step() == 0:
            self.hub.heal(self)

    def allreduce(self, tensor, should_quantize=False):
        work = self.inner.allreduce(tensor)
        if self.broken:
            tensor.fill_(7.0)
        return work

    def should_commit(self):
        self.votes += 1
        return self.votes - 1 not in self.refused and self.inner.should_commit()


class Hub:
    """Heals all replicas from rank 0 at the first step, as torchft does with ``init_sync=True``."""

    def __init__(self):
        self.barrier = threading.Barrier(REPLICAS, timeout=PATIENCE)

    def heal(self, manager):
        if manager.rank == 0:
            self.states = [[copy.clone() for copy in copies] for copies in manager.state()]
        self.barrier.wait()
        if manager.rank:
            manager.load(self.states)
        self.barrier.wait()


def net(seed=0, width=4, frozen=0.0):
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model[1].bias.fill_(frozen)
    model[1].bias.requires_grad_(False)
    return model


class Replicas:
    """Two replicas over managers; what each ended with, its reports and its manager."""

    def __init__(self, lab, make=MockManager, model=lambda rank: net(), steps=6, idle=0, **options):
        """In the first ``idle`` steps rank 1 learns nothing."""
        self.reports, self.managers = [[], []], [None, None]

        def replica(exchange):
            rank = exchange.rank
            self.managers[rank] = manager = make(exchange)
            own = {"sync_every": 2, "on_sync": self.reports[rank].append}
            own |= {
                key: value(rank) if callable(value) else value for key, value in options.items()
            }
            trained = model(rank)
            inner = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
            over = ManagerExchange(manager, rank=rank, world_size=REPLICAS)
            try:
                with DiLoCo(trained, inner, over, **own):
                    for step in range(steps):
                        inner.param_groups[0]["lr"] = 0.0 if rank == 1 and step < idle else 0.1
                        lab.push(trained, inner, rank, step)
            except BaseException as error:
                exchange.abort(error)
                raise
            return lab.values(trained)

        self.results = run_replicas(replica, in_process(REPLICAS))


def refused(result, words):
    with pytest.raises(MismatchError, match=f"(?s){words}"):
        raise result


DIFFERENT = {
    "outer_lr": ({"outer_lr": lambda rank: 0.5 + rank / 10}, "settings", r"'?outer.*0\.[56]"),
    "momentum": ({"outer_momentum": lambda rank: 0.5 + rank / 10}, "settings", r"0\.[56]"),
    "sync_every": ({"sync_every": lambda rank: 2 + rank}, "settings", "sync_every"),
    "shape": ({"model": lambda r: net(width=4 + r)}, "names, shapes or dtypes", r"0\.w.*\[[45], 3"),
    "frozen": ({"model": lambda r: net(frozen=float(r))}, "values of frozen parameters", "1.bias"),
    "init='check'": ({"model": net, "init": "check"}, "initial values of the model", "0.weight"),
}


@pytest.mark.parametrize("make", [MockManager, Foreign])
@pytest.mark.parametrize("what", DIFFERENT)
def test_every_replica_says_in_what_they_differ_and_what_it_has(lab, what, make):
    """A mock manager names the setting or tensor, any other the kind of difference too."""
    options, category, shown = DIFFERENT[what]
    run = Replicas(lab, make, **options)
    for rank, result in enumerate(run.results):
        if make is Foreign:
            refused(result, f"differ in the {category}.*Rank {rank} has .*{shown}")
        else:
            refused(result, f"^rank .*{shown}")
    if make is Foreign:
        assert run.results[0].args[0] != run.results[1].args[0], "each shows what it has itself"
    assert run.reports == [[], []], "no outer step was taken"


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_over_a_mock_manager_over_a_store_too(lab, tmp_path, kind):
    def replica(exchange):
        model = net(exchange.rank)
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with DiLoCo(model, inner, ManagerExchange(MockManager(exchange)), sync_every=2):
            for step in range(6):
                lab.push(model, inner, exchange.rank, step)
        exchange.leave()
        return lab.values(model)

    exchanges = in_process(2) if kind == "memory" else lab.store_exchanges(tmp_path, 2)
    assert lab.identical([*lab.run(replica, exchanges), Replicas(lab).results[0]])
    assert not list(tmp_path.glob("run/state/00000000/*")), "what was published first is gone"


def test_initial_values_that_differ_are_refused(lab):
    run = Replicas(lab, Foreign, model=net)
    for result in run.results:
        refused(result, r"values from which they have trained.*init_sync=True")


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_replica_that_is_healed_takes_the_initial_values(lab, caplog, fragments):
    hub = Hub()
    run = Replicas(lab, lambda exchange: Foreign(exchange, hub), model=net, fragments=fragments)
    expected = Replicas(lab, fragments=fragments, idle=2 // fragments)
    assert lab.identical([*run.results, *expected.results])
    first, second = ([report.contribution for report in each][:2] for each in run.reports)
    assert (first, second) == (["counted", "counted"], ["dropped", "counted"])
    assert "rank 1: the manager has healed this replica, which goes on with the" in caplog.text
    # One that has these values loses nothing.
    hub = Hub()
    run = Replicas(lab, lambda exchange: Foreign(exchange, hub), fragments=fragments)
    assert lab.identical([*run.results, *Replicas(lab, fragments=fragments).results])
    assert {report.contribution for reports in run.reports for report in reports} == {"counted"}


def test_a_replica_that_comes_too_late_refuses_itself(lab):
    class Late(Foreign):
        def start_quorum(self):
            super().start_quorum()
            self.inner._step += 3 * (self.rank == 1)

    run = Replicas(lab, Late)
    text = r"rank 1 has come too late: it was at step 0 .* at step 3\..*min_replicas"
    refused(run.results[1], text)
    assert not isinstance(run.results[0], MismatchError)


@pytest.mark.parametrize("make", [MockManager, Foreign])
def test_votes_that_differ_are_noticed_at_the_next_sync(lab, make):
    def managed(exchange):
        manager = make(exchange)
        vote, votes = manager.should_commit, []

        def mine():
            votes.append(vote())
            return exchange.rank == 0 or len(votes) != 2

        manager.should_commit = mine
        return manager

    run = Replicas(lab, managed)
    for result in run.results:
        refused(result, r"after [12] outer steps.*outer steps that others have not")
    first, second = ([report.committed for report in each] for each in run.reports)
    assert (first, second) == ([True, True], [True, False])


def test_a_vote_of_no_is_in_the_report_and_in_the_log(lab, caplog):
    with caplog.at_level(logging.WARNING, "diloco_core"):
        run = Replicas(lab, lambda exchange: Foreign(exchange, refused={1}))
    for reports in run.reports:
        assert [(r.committed, r.contribution, r.inner_steps, r.members) for r in reports] == [
            (True, "counted", 2, 2),
            (False, "dropped", 2, 0),
            (True, "counted", 2, 2),
        ]
    text = "the manager has voted against the sync of fragment 0 after 1 outer steps. What this"
    for rank, record in enumerate(sorted(caplog.records, key=lambda record: record.message)):
        assert record.message.startswith(f"rank {rank}: {text} replica has learned")
    assert lab.identical(run.results)


def test_what_a_failed_average_leaves_behind_is_no_mismatch(lab):
    """torchft's managers return numbers that mean nothing, and vote no afterwards."""

    class Breaking(Foreign):
        def start_quorum(self):
            super().start_quorum()
            self.broken = self.votes == 1

    run = Replicas(lab, lambda exchange: Breaking(exchange, refused={1}))
    assert [report.committed for report in run.reports[0]] == [True, False, True]
    assert lab.identical(run.results)


def test_buffers_that_cannot_be_averaged_are_refused(lab):
    over = ManagerExchange(MockManager(in_process(1)[0]))
    with pytest.raises(ConfigurationError, match=r"integer buffers .*pass buffers='none'"):
        lab.replica(lambda rank: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), over, steps=0)


class TestAverages:
    @pytest.mark.parametrize("replicas", [1, 2, 3, 7, 1000])
    def test_equal_things_agree_however_they_are_averaged(self, replicas):
        things = [Compared(str(number), f"value {number}", "") for number in range(5)]
        sums = numbers(things)
        one_by_one = sum(sums.div(replicas) for _ in range(replicas))
        at_once = sums.mul(replicas).mul(1 / replicas)
        assert first_difference(things, one_by_one) is None
        assert first_difference(things, at_once) is None

    def test_own_numbers_in_an_average_hide_nothing(self):
        """Three replicas of which one has just the mean of the other two."""
        things = [Compared("a", "x", "")]
        sums = numbers(things)
        above, below = sums.clone(), sums.clone()
        for tensor, by in ((above, 1.0), (below, -1.0)):
            tensor[:, :8] += by
            tensor[:, 8:] = tensor[:, :8] ** 2
        mean = torch.stack([sums, above, below]).mean(dim=0)
        assert torch.equal(mean[:, :8], sums[:, :8])
        assert torch.equal(sums[:, 8:], sums[:, :8] ** 2)
        assert first_difference(things, mean) is not None
        nothing = torch.full_like(sums, float("nan"))
        assert first_difference(things, nothing) is not None, "what is no number is no agreement"
