"""Ways to get delay, mixing and codecs wrong, each of which the formulas tell apart."""

import pytest
import torch
from delay_lab import by_the_formulas, exchanges, train

import diloco_core._exchange._threads as threads
import diloco_core._wire._inputs as store_inputs
from diloco_core import DiLoCo, connect, in_process
from diloco_core._arithmetic._layout import Piece
from diloco_core._codecs._named import CODECS
from diloco_core._outer._delayed import DelayedFragment
from diloco_core._terms._schedule import Due, Schedule

CASE = {
    "fragments": 2, "period": 4, "delay": 2, "alpha": 0.5, "inner": "momentum", "outer": "Nesterov",
    "steps": 17,
}  # fmt: skip


def sent_when_it_is_applied(monkeypatch):
    """The pseudo-gradient holds the steps of the delay, too."""
    due = Schedule.due

    def late(self, since_adoption, *, sent=False, half_taken=False):
        adopt = due(self, since_adoption, sent=True, half_taken=half_taken).adopt
        return Due(adopt and not sent, adopt)

    monkeypatch.setattr(Schedule, "due", late)


def the_snapshot_follows_the_model(monkeypatch):
    """What is sent is read when it is needed, after the model has gone on."""
    depart = DelayedFragment.depart

    def forgetful(self):
        depart(self)
        self._snapshot = None
        self._detached = False
        self.begin()

    monkeypatch.setattr(DelayedFragment, "depart", forgetful)


def mixed_before_the_outer_step(monkeypatch):
    """The own values are mixed with the values before the sync; the outer step is added to that."""
    depart, mix = DelayedFragment.depart, DelayedFragment._mix

    def remember(self):
        self.values_before = [values.clone() for values in self.copy]
        depart(self)

    def early(self, whole, alpha, before, near):
        old, new = self.values_before[whole.group], self.copy[whole.group].clone()
        self.copy[whole.group].copy_(old)
        mix(self, whole, alpha, before, near)
        self.copy[whole.group].copy_(new)
        for local, start, stop in self._segments.overlaps(whole):
            local.add_(new[start:stop] - old[start:stop])

    monkeypatch.setattr(DelayedFragment, "depart", remember)
    monkeypatch.setattr(DelayedFragment, "_mix", early)


def the_base_stays_old(monkeypatch):
    """Take the next pseudo-gradient from the model after mixing, not from the global copy."""
    arrive = DelayedFragment.arrive

    def stale(self, fate):
        arrive(self, fate)
        self.begin()
        self.base = [torch.empty_like(values) for values in self.copy]
        for index, group in enumerate(self.layout.groups):
            for local, start, stop in self._segments.overlaps(Piece(index, 0, group.numel)):
                self.base[index][start:stop].copy_(local)
        self.finish()

    depart = DelayedFragment.depart

    def from_there(self):
        depart(self)
        for sent, copy, base in zip(
            self._snapshot.sent, self.copy, getattr(self, "base", self.copy), strict=True
        ):
            sent.add_(base - copy)

    monkeypatch.setattr(DelayedFragment, "arrive", stale)
    monkeypatch.setattr(DelayedFragment, "depart", from_there)


MUTANTS = [
    sent_when_it_is_applied,
    the_snapshot_follows_the_model,
    mixed_before_the_outer_step,
    the_base_stays_old,
]


def as_by_the_formulas(lab):
    wanted, _ = by_the_formulas(2, **CASE)
    runs = lab.run(lambda exchange: train(exchange, **CASE), exchanges("threads", 2))
    return all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        for (seen, _, _), run in zip(runs, wanted, strict=True)
        for step, other in zip(seen, run, strict=True)
        for a, b in zip(step, other, strict=True)
    )


def test_the_formulas_are_met(lab):
    assert as_by_the_formulas(lab)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_delay_is_caught(lab, mutant, monkeypatch):
    mutant(monkeypatch)
    assert not as_by_the_formulas(lab)


OWN = {
    "threads": threads,
    "fixed": store_inputs,
    "sharded": store_inputs,
    "gather": store_inputs,
}
"""Where each exchange takes a replica's own contribution from."""


def is_the_mean_of_what_decodes(lab, kind, folder):
    """Say whether both replicas end one sync with the mean of their decoded contributions."""
    codec = CODECS["e2m1"]
    values = [torch.randn(30, 40, generator=torch.Generator().manual_seed(rank)) for rank in (0, 1)]
    decoded = [torch.empty(1200), torch.empty(1200)]
    for own, out in zip(values, decoded, strict=True):
        codec.decode(codec.encode(own.flatten()), out)

    def replica(exchange):
        model = torch.nn.Linear(40, 30, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": codec}
        with DiLoCo(model, optimizer, exchange, **options):
            model.weight.grad = values[exchange.rank].clone()
            optimizer.step()
        return model.weight.detach().flatten().clone()

    membership = {} if kind == "fixed" else {"min_replicas": 2, "topology": kind}
    made = (
        in_process(2)
        if kind == "threads"
        else [connect(folder, rank=rank, world_size=2, **membership) for rank in range(2)]
    )
    mean = -(decoded[0] + decoded[1]) / 2
    return all(torch.equal(end, mean) for end in lab.run(replica, made))


@pytest.mark.parametrize("kind", OWN)
def test_an_own_contribution_that_is_not_encoded_is_caught(lab, kind, tmp_path, monkeypatch):
    assert is_the_mean_of_what_decodes(lab, kind, str(tmp_path / "right"))
    monkeypatch.setattr(OWN[kind], "as_sent", lambda job: job.contributed)
    assert not is_the_mean_of_what_decodes(lab, kind, str(tmp_path / "wrong"))
