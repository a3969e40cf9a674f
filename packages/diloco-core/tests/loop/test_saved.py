"""What is kept of an outer loop and changes before it is used: the caller's references, a damaged
file, what was not loaded.
"""

import copy
import logging

import pytest
import torch

from diloco_core import ConfigurationError, DiLoCo, Elastic, StoreExchange, in_process
from diloco_core._store._open import open_store


class Saved:
    """A loop after three of its four steps, its state saved; and loops that go on from it."""

    def __init__(
        self, lab, make=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    ):
        self.lab, self.make = lab, make
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
        (exchange,) = in_process(1)
        net = self.lab.small_model()
        inner = self.make(net.parameters())
        return net, inner, DiLoCo(net, inner, exchange, sync_every=2, fragments=2)

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


@pytest.fixture
def saved(lab):
    return Saved(lab)


def same(values, expected):
    return values.keys() == expected.keys() and all(
        torch.equal(values[name], expected[name]) for name in values
    )


def test_references_that_training_has_changed_since_are_refused(saved):
    assert same(saved.go_on(saved.state), saved.expected)
    with pytest.raises(
        ConfigurationError,
        match=r"have changed since state_dict.. returned them.* write the state to a file at once",
    ):
        saved.go_on(saved.references)


def places(state):
    """A function that changes every value that decides something, by its name."""
    for number, part in enumerate(state["fragments"]):
        for group in range(len(part["copy"])):
            yield (
                f"copy {number} {group}",
                lambda s, n=number, g=group: s["fragments"][n]["copy"][g]
                .view(torch.uint8)[:1]
                .bitwise_xor_(1),
            )
        for entry, held in enumerate(part["outer"]["ranges"]):
            for name in held["tensors"]:
                yield (
                    f"{name} {number} {entry}",
                    lambda s, n=number, e=entry, t=name: s["fragments"][n]["outer"]["ranges"][e][
                        "tensors"
                    ][t].neg_(),
                )
            yield (
                f"range {number} {entry}",
                lambda s, n=number, e=entry: s["fragments"][n]["outer"]["ranges"][e][
                    "range"
                ].reverse(),
            )
    for key in ("committed", "inner_steps", "since_event"):
        yield key, lambda s, key=key: s.update({key: s[key] + 1})
    yield "since_sync", lambda s: s["since_sync"].reverse()
    yield "has_inner_state", lambda s: s["has_inner_state"].append(False)


def test_every_value_is_covered_by_the_digest(saved):
    changes = dict(places(saved.state))
    assert len(changes) > 10
    for change in changes.values():
        state, outer = copy.deepcopy(saved.state), saved.parts()[2]
        change(state)
        with pytest.raises(ConfigurationError, match="have changed since state_dict"):
            outer.load_state_dict(state)


def test_what_was_loaded_is_a_copy(saved):
    state = copy.deepcopy(saved.state)

    def clear():
        for part in state["fragments"]:
            for entry in part["outer"]["ranges"]:
                for tensor in entry["tensors"].values():
                    tensor.zero_()

    assert same(saved.go_on(state, meanwhile=clear), saved.expected)


def test_inner_state_that_was_not_loaded_is_told_of(lab, saved, caplog):
    saved.go_on(saved.state)
    assert caplog.text == ""
    saved.go_on(saved.state, inner_state=False)
    assert (
        "the inner optimizer (SGD) had a state when this outer loop was saved, and has none now"
        in caplog.text
    )
    caplog.clear()
    plain = Saved(lab, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    plain.go_on(plain.state, inner_state=False)
    assert caplog.text == "", "it never had one"


@pytest.mark.parametrize(
    ("steps", "told"), [(0, False), (1, True), (2, True), (3, False), (4, False)]
)
def test_a_block_that_keeps_nothing_of_its_training_says_so(lab, caplog, steps, told):
    (exchange,) = in_process(1)
    net = lab.small_model()
    outer, inner = lab.outer_loop(net, exchange, sync_every=3, flush="none")
    with outer:
        for _ in range(steps):
            lab.small_step(net, inner)
    assert (
        f"the block was left after {steps} inner steps, before the first sync" in caplog.text
    ) is told, caplog.text


def test_an_elastic_run_that_stands_where_it_was_to_end_says_so(lab, tmp_path, caplog):
    for resume in (False, True):
        caplog.clear()
        exchange = StoreExchange(
            open_store(str(tmp_path / "run")), 0, 1, Elastic(1, grace=1.0, resume=resume)
        )
        net = lab.small_model()
        outer, inner = lab.outer_loop(net, exchange)
        with caplog.at_level(logging.WARNING), outer:
            while outer.committed < 2:
                lab.small_step(net, inner)
    assert "without a single step of the inner optimizer. The run is at outer step 2" in caplog.text
