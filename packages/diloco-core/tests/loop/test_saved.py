"""Saved states that do not fit where they are loaded, or are not what they were, are refused."""

import copy
import logging
from itertools import pairwise

import pytest
import torch
from loop_lab import exchanges, loop
from resuming_lab import Experiment, make_model
from torch import nn

from diloco_core import ConfigurationError, MismatchError, SyncError, in_process
from diloco_core.testing import run_replicas


def model_of(*sizes):
    return nn.Sequential(*(nn.Linear(before, after) for before, after in pairwise(sizes)))


def states(lab, world_size, models=None, shift=0, **options):
    """Real states, one per rank; what the models hold goes into ``models``."""

    def replica(exchange):
        model, inner, outer, _ = loop(exchange, lab.fill(model_of(2, 20, 2)), **options)
        with outer:
            for step in range(2):
                lab.push(model, inner, exchange.rank, step + shift)
        if models is not None:
            models[exchange.rank] = lab.values(model)
        return outer.state_dict()

    return lab.run(replica, in_process(world_size))


def refused(message, state, exchange=None, model=None, **options):
    outer = loop(exchange, model or model_of(2, 20, 2), **options)[2]
    with pytest.raises(ConfigurationError, match=message):
        outer.load_state_dict(state)


def test_a_state_of_something_else(lab):
    first, second = states(lab, 2)
    here = in_process(2)[0]
    refused("rank is 1 in the saved state, but 0 in", second, here)
    refused("world_size is 2 in the saved state, but 1 in", first)
    refused("version is 99 in the saved state, but 4 in", {**first, "version": 99}, here)
    refused("version is None in the saved state", {"weight": torch.ones(1)})
    for wrong in (None, [1, 2], "state"):
        refused(r"must be what DiLoCo\.state_dict", wrong)


ADAM = {"outer_optimizer": lambda given: torch.optim.Adam(given, lr=0.7)}
OTHERS = [
    (model_of(2, 21, 2), {}, r"tensor '0.weight' is float32\[20, 2\].*float32\[21, 2\]"),
    (model_of(2, 20, 2).double(), {}, r"tensor '0.weight' is float32.* saved state, but float64"),
    (nn.ModuleDict({"a": nn.Linear(2, 20), "b": nn.Linear(20, 2)}), {},
     "tensor 'a.weight' is absent in the saved state, but float32"),
    (model_of(2, 20, 2, 2), {}, "tensor '2.weight' is absent"),
    (model_of(2, 20), {}, "tensor '1.weight' is float32.* in the saved state, but absent"),
    (None, {"fragments": 2}, "setting 'fragments' is 1 in the saved state, but 2 in"),
    (None, {"buffers": "rank0"}, "setting 'buffers' is mean in the saved state, but rank0 in"),
    (None, {"outer_lr": 0.5}, "setting 'outer_lr' is 0.7 in the saved state, but 0.5 in"),
    (None, {"outer_momentum": 0.8}, "'outer_momentum' is 0.9 in the saved state, but 0.8 in"),
    (None, {"nesterov": False}, "'outer_nesterov' is True in the saved state, but False in"),
    (None, ADAM, "'outer_optimizer' is SGD in the saved state, but Adam in"),
]  # fmt: skip


def test_a_state_of_another_model_or_of_other_settings_that_decide(lab):
    (state,) = states(lab, 1)
    for model, options, named in OTHERS:
        refused(named, state, model=model, **options)


def places(state):
    """Functions that change a value that decides something, or its kind."""
    for number, part in enumerate(state["fragments"]):
        for group in range(len(part["copy"])):
            yield lambda s, n=number, g=group: (
                s["fragments"][n]["copy"][g].view(torch.uint8)[:1].bitwise_xor_(1)
            )
        for entry, held in enumerate(part["outer"]["ranges"]):
            of = lambda s, n=number, e=entry: s["fragments"][n]["outer"]["ranges"][e]  # noqa: E731
            for name in held["tensors"]:
                yield lambda s, of=of, t=name: of(s)["tensors"][t].neg_()
            yield lambda s, of=of: of(s)["range"].reverse()
        for key, wrong in (("outer", {}), ("outer", None), ("copy", [1.0])):
            yield lambda s, n=number, k=key, w=wrong: s["fragments"][n].update({k: w})
    for key in ("committed", "inner_steps", "since_event"):
        for wrong in (state[key] + 1, str(state[key]), -5, None, True):
            yield lambda s, k=key, w=wrong: s.update({k: w})
    yield lambda s: s["since_sync"].reverse()
    yield lambda s: s["since_sync"].append(2)
    yield lambda s: s["has_inner_state"].append(False)
    for key in ("fragments", "settings", "tensors", "model", "since_sync", "stepped", "outer_lr"):
        yield lambda s, k=key: s.update({k: None})
        yield lambda s, k=key: s.pop(k)
    yield lambda s: s.update(fragments=[{}])


class Saved:
    """A loop after three of its four steps, its state saved; and loops that go on from it."""

    def __init__(self, lab, momentum=0.9):
        self.lab, self.momentum = lab, momentum
        net, inner, outer = self.parts()
        with outer:
            for _ in range(3):
                lab.small_step(net, inner)
            self.references = outer.state_dict()
            self.state = copy.deepcopy(self.references)
            self.model, self.inner = copy.deepcopy([net.state_dict(), inner.state_dict()])
            lab.small_step(net, inner)
        self.expected = lab.values(net)

    def parts(self):
        net = self.lab.small_model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=self.momentum)
        return net, inner, loop(None, net, inner, fragments=2)[2]

    def go_on(self, state, *, inner_state=True, meanwhile=lambda: None):
        net, inner, outer = self.parts()
        net.load_state_dict(self.model)
        if inner_state:
            inner.load_state_dict(self.inner)
        outer.load_state_dict(state)
        meanwhile()
        with outer:
            self.lab.small_step(net, inner)
        return self.lab.values(net)


def test_every_value_is_covered_by_the_digest(lab):
    saved = Saved(lab)
    changes = list(places(saved.state))
    assert len(changes) > 40
    outer = saved.parts()[2]
    for change in changes:
        state = copy.deepcopy(saved.state)
        change(state)
        with pytest.raises(ConfigurationError, match="the saved state of the outer loop have ch"):
            outer.load_state_dict(state)
    assert lab.identical([saved.go_on(saved.state), saved.expected])
    with pytest.raises(ConfigurationError, match="write the state to a file at once"):
        saved.go_on(saved.references)


def test_what_was_loaded_is_a_copy(lab):
    saved = Saved(lab)
    state = copy.deepcopy(saved.state)

    def clear():
        for part in state["fragments"]:
            for entry in part["outer"]["ranges"]:
                for tensor in entry["tensors"].values():
                    tensor.zero_()

    assert lab.identical([saved.go_on(state, meanwhile=clear), saved.expected])


def test_inner_state_that_was_not_loaded_is_told_of(lab, caplog):
    saved = Saved(lab)
    saved.go_on(saved.state)
    assert caplog.text == ""
    saved.go_on(saved.state, inner_state=False)
    text = "the inner optimizer (SGD) had a state when this outer loop was saved, and has none now"
    assert text in caplog.text
    caplog.clear()
    plain = Saved(lab, momentum=0)
    plain.go_on(plain.state, inner_state=False)
    assert caplog.text == "", "it never had one"


def test_the_outer_state_of_some_shards_is_not_that_of_all(lab):
    """A manager leaves every shard to every replica; between threads, each has its own."""
    models = {}
    saved = states(lab, 2, models)

    def replica(exchange):
        model, inner, outer, _ = loop(exchange, model_of(2, 20, 2), sync_every=1)
        model.load_state_dict(models[exchange.rank])
        outer.load_state_dict(saved[exchange.rank])
        with outer:
            lab.push(model, inner, exchange.rank, 2)

    for error in run_replicas(replica, exchanges("manager", 2)):
        assert "state for the shards of another replica" in str(error)


def test_states_of_different_syncs_or_values_do_not_meet(lab):
    experiment = Experiment(lab)
    early = lab.run(experiment.until(3), in_process(2))
    late = lab.run(experiment.until(9), in_process(2))
    results = run_replicas(experiment.since([early[0], late[1]], 9), in_process(2))
    assert lab.kinds(results) == [MismatchError] * 2
    assert "differ in setting 'committed'" in str(results[0])
    assert "that were saved after the same outer step" in str(results[0])
    models, others = {}, {}
    mixed = states(lab, 2, models)[0], states(lab, 2, others, shift=7)[1]
    models[1] = others[1]

    def replica(exchange):
        model, _, outer, _ = loop(exchange, model_of(2, 20, 2))
        model.load_state_dict(models[exchange.rank])
        outer.load_state_dict(mixed[exchange.rank])
        with outer:
            pass

    results = run_replicas(replica, in_process(2))
    assert lab.kinds(results) == [MismatchError] * 2
    assert "tensor '0.weight'" in str(results[0])


def test_a_state_is_there_and_is_loaded_in_order(lab):
    (state,) = states(lab, 1)
    outer = loop(None, model_of(2, 20, 2))[2]
    with pytest.raises(SyncError, match="no state yet"):
        outer.state_dict()
    with outer, pytest.raises(SyncError, match="before"):
        outer.load_state_dict(state)


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["nothing", "a parameter", "a buffer", "a later step"])
def test_a_model_that_was_not_loaded(lab, what):
    """Else the first sync would take the difference for progress."""
    experiment = Experiment(lab)
    saved = lab.run(experiment.until(5), in_process(2))

    def replica(exchange):
        model, inner, outer = experiment.parts(exchange)
        experiment.load(saved[exchange.rank], model, inner, outer)
        if exchange.rank == 0:
            pass
        elif what == "nothing":
            model.load_state_dict(make_model(lab, torch.float32).state_dict())
        elif what == "a parameter":
            model[2].bias.data[1] += 1e-7
        elif what == "a buffer":
            model[1].running_var[3] += 1e-7
        else:
            lab.push(model, torch.optim.SGD(model.parameters(), lr=1.0), 0, 5)
        with outer:
            pass

    first, second = run_replicas(replica, in_process(2))
    assert isinstance(second, ConfigurationError)
    text = "does not hold the values that it held when the state of this outer loop was saved"
    assert text in str(second)
    assert "load_state_dict" in str(second)
    assert "rank 1 failed" in str(first)


def test_an_elastic_run_that_stands_where_it_was_to_end_says_so(lab, tmp_path, caplog):
    for resume in (False, True):
        caplog.clear()
        (exchange,) = exchanges("elastic", 1, tmp_path, resume=resume, grace=1.0)
        model, inner, outer, _ = loop(exchange, sync_every=1)
        with caplog.at_level(logging.WARNING), outer:
            while outer.committed < 2:
                lab.push(model, inner, 0, outer.inner_steps)
    assert "without a single step of the inner optimizer. The run is at outer step 2" in caplog.text
