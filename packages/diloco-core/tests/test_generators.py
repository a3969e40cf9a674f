"""torch's default random generator, where several replicas share a process."""

import torch

from diloco_core import DiLoCo, connect


class Turns:
    """A lock that knows whether it is held."""

    held = 0

    def __enter__(self):
        self.held += 1

    def __exit__(self, *exc):
        self.held -= 1


def test_readers_of_the_state_take_turns_and_disturb_nobody(tmp_path, monkeypatch):
    """Two threads in torch at the same time have been seen to wait for each other for ever."""
    turns, seen = Turns(), []
    monkeypatch.setattr("diloco_core._generators.TURNS", turns)
    for name in ("get_rng_state", "set_rng_state"):
        for module in (torch, torch.random):
            real = getattr(module, name)

            def noted(*state, real=real, name=name):
                seen.append((name, turns.held > 0))
                return real(*state)

            monkeypatch.setattr(module, name, noted)
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    for resume in (False, True):
        model = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = connect(tmp_path, rank=0, world_size=1, resume=resume)
        torch.manual_seed(3)
        with DiLoCo(model, inner, exchange, sync_every=1, save_inner_every=1):
            model.weight.grad = torch.ones(1, 2)
            inner.step()
            assert resume or torch.equal(torch.rand(2), wanted)
    assert {name for name, _ in seen} == {"get_rng_state", "set_rng_state"}
    assert all(held for _, held in seen)
