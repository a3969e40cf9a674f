"""The eight members that torchft's DiLoCo needs of its manager, over our exchanges."""

import pytest
import torch

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
