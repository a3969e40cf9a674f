"""The eight members that torchft's DiLoCo needs of its manager, over our exchanges."""

import copy
from itertools import pairwise

import pytest
import torch
from loop_lab import Refusing, live, loop
from torch import nn

from diloco_core import (
    ConfigurationError,
    ManagerExchange,
    MockManager,
    NonFiniteDeltaError,
    in_process,
)
from diloco_core.testing import run_replicas

MEMBERS = (
    "_use_async_quorum allow_state_dict_read allreduce current_step disallow_state_dict_read "
    "register_state_dict_fn should_commit start_quorum"
)


def test_it_has_the_eight_members():
    manager = MockManager(in_process(1)[0])
    assert all(hasattr(manager, name) for name in MEMBERS.split())
    assert manager._use_async_quorum is False
    manager.register_state_dict_fn("model", lambda state: None, lambda: {"a": 1})
    assert manager.state_dict_fns["model"][1]() == {"a": 1}
    manager.disallow_state_dict_read()
    manager.allow_state_dict_read()


def test_averages_in_place_and_counts_commits():
    def replica(exchange):
        manager = MockManager(exchange)
        seen = []
        for step in range(3):
            assert manager.current_step() == step
            manager.start_quorum()
            each = torch.full((2, 2), float(exchange.rank + step))
            tensors = [each, torch.tensor([1.0 + exchange.rank])]
            works = [manager.allreduce(tensor) for tensor in tensors]
            for work, tensor in zip(works, tensors, strict=True):
                assert work.wait()
                assert work.get_future().wait()[0] is tensor
            assert manager.should_commit()
            seen.append([tensor.clone() for tensor in tensors])
        return seen

    for seen in run_replicas(replica, in_process(3)):
        for step, (first, second) in enumerate(seen):
            assert torch.equal(first, torch.full((2, 2), 1.0 + step))
            assert second.tolist() == [2.0]


@pytest.mark.parametrize(
    "options", [{"rank": "1"}, {"rank": 1}, {"world_size": 0}, {"rank": True, "world_size": 2}]
)
def test_impossible_numbers_are_refused(options):
    with pytest.raises(ConfigurationError, match="must be"):
        ManagerExchange(MockManager(in_process(1)[0]), **options)


def test_what_no_manager_does_is_refused():
    manager = MockManager(in_process(1)[0])
    with pytest.raises(ConfigurationError, match="should_quantize"):
        manager.allreduce(torch.ones(1), should_quantize=True)
    manager._use_async_quorum = True
    with pytest.raises(ConfigurationError, match="use_async_quorum=False"):
        ManagerExchange(manager)
    with pytest.raises(ConfigurationError, match="not have start_quorum, allreduce, should_commit"):
        ManagerExchange(in_process(1)[0])


def test_the_rank_whose_contribution_is_refused_is_named(lab):
    def replica(exchange):
        model = lab.fill(lab.small_model())
        over = ManagerExchange(MockManager(exchange), rank=exchange.rank, world_size=2)
        outer, optimizer = lab.outer_loop(model, over, buffers="none")
        try:
            with outer:
                lab.small_step(model, optimizer)
                if exchange.rank == 1:
                    with torch.no_grad():
                        model[0].bias[0] = float("nan")
                lab.small_step(model, optimizer)
        except BaseException as error:
            exchange.abort(error)
            raise

    results = run_replicas(replica, in_process(2))
    assert isinstance(results[1], NonFiniteDeltaError)
    assert results[1].rank == 1
    assert results[0].rank == 1


class Noting(Refusing):
    """Notes when the model may be read."""

    def __init__(self, exchange, refused):
        super().__init__(exchange, refused)
        self.reading = []

    def disallow_state_dict_read(self):
        super().disallow_state_dict_read()
        self.reading.append("stop")

    def allow_state_dict_read(self):
        super().allow_state_dict_read()
        self.reading.append("go")


def equal(a, b):
    """Return whether two states are the same to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


OUTER = {"Nesterov": {}, "Adam": {"outer_optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("refused", [{0}, {3, 4, 7}])
def test_global_copies_and_outer_states_stay_to_the_bit(lab, outer, refused):
    def replica(exchange):
        manager, seen = Noting(exchange, refused), []

        def note(report):
            state = copy.deepcopy(made.state_dict()["fragments"])
            seen.append((report, state))
            if report:
                held = nn.utils.parameters_to_vector(model[int(report.fragment)].parameters())
                assert torch.equal(held, state[int(report.fragment)]["copy"][0])

        model = lab.fill(nn.ModuleList(nn.Linear(3, 4) for _ in range(3)))
        options = {"sync_every": 6, "fragments": 3, "on_sync": note, **OUTER[outer]}
        _, inner, made, _ = loop(ManagerExchange(manager), model, **options)
        live(model, inner, made, lambda _: note(None), *range(18))
        return manager, made, seen

    for manager, made, seen in lab.run(replica, in_process(2)):
        assert manager.reading == ["stop", "go"] * (len(seen) - 1)
        committed = 0
        for number, ((_, before), (report, after)) in enumerate(pairwise(seen)):
            assert report.committed is (number not in refused)
            assert report.fragment == str(committed % 3), "a refused fragment is tried again"
            changed = [n for n in range(3) if not equal(before[n], after[n])]
            assert changed == ([committed % 3] if report.committed else [])
            committed += report.committed
            assert report.sync == committed
        assert made.committed == manager.current_step() == committed
