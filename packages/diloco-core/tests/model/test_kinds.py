"""Kinds of tensors and optimizers that cannot be synced or counted are refused by name, whenever
they appear.
"""

import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    ModelChangedError,
    RendezvousError,
    SyncError,
    Timing,
    connect,
    export,
    in_process,
)
from diloco_core._model._memory import first_overlap
from diloco_core._model._values import checksum


def make(model, inner=None, **options):
    inner = inner or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    return model, inner, DiLoCo(model, inner, in_process(1)[0], **{"sync_every": 1, **options})


class Counting(nn.Linear):
    """Puts a new tensor in its buffer's place at every pass."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, values):
        self.seen = self.seen + 1
        return super().forward(values)


class TestInferenceMode:
    def test_a_buffer_that_was_made_in_it(self, lab):
        model, inner, outer = make(lab.fill(Counting()))

        def train():
            with outer:
                with torch.inference_mode():
                    model(torch.zeros(1, 2))
                lab.push(model, inner, 0, 0)

        with pytest.raises(
            ModelChangedError, match=r"'seen' was made inside torch.inference_mode.*no_grad"
        ) as caught:
            train()
        assert caught.value.tensor == "seen"

    def test_a_model_that_was_made_in_it(self):
        with torch.inference_mode():
            model = nn.Linear(2, 2)
        with pytest.raises(ConfigurationError, match="parameter 'weight' was made inside"):
            make(model)
        model = nn.Linear(2, 2)
        with torch.inference_mode():
            model.register_buffer("table", torch.ones(2))
        with pytest.raises(
            ConfigurationError, match="buffer 'table' is a tensor that was made inside"
        ):
            make(model)
        make(model, buffers="none")

    def test_a_loop_that_is_made_in_it(self):
        model = nn.Linear(2, 2)
        with (
            torch.inference_mode(),
            pytest.raises(ConfigurationError, match="cannot be made inside"),
        ):
            make(model)

    def test_a_flush_in_it_leaves_nothing_behind(self, lab):
        """The outer optimizer's state is made by the first sync, and written by the second one."""

        def run(mode):
            def outer_optimizer(parameters):
                return torch.optim.AdamW(parameters, lr=0.1)

            model, inner, outer = make(
                lab.fill(nn.Linear(2, 2)), sync_every=3, outer_optimizer=outer_optimizer
            )
            with outer:
                lab.push(model, inner, 0, 0)
                with mode:
                    outer.flush()
                for step in range(4):
                    lab.push(model, inner, 0, step)
            return lab.values(model)

        assert lab.identical([run(torch.inference_mode()), run(torch.no_grad())])


class TestMemory:
    def test_elements_that_come_to_share_memory_in_their_place(self, lab):
        model, inner, outer = make(lab.fill(nn.Linear(2, 3)), sync_every=2)

        def train():
            with outer:
                lab.push(model, inner, 0, 0)
                model.bias.data = model.bias.data[:1].expand(3)
                model.bias.requires_grad_(False)
                model.bias.grad = None
                lab.push(model, inner, 0, 1)

        with pytest.raises(
            ModelChangedError, match=r"elements of 'bias' .* share memory with each other"
        ):
            train()

    @pytest.mark.parametrize(
        ("shape", "stride", "shared"),
        [
            ((3, 10), (0, 10), True),
            ((10, 3), (10, 0), True),
            ((2, 2), (3, 3), True),
            ((2, 3), (2, 1), True),
            ((2, 3), (1, 2), False),
            ((3, 2), (2, 3), False),
            ((4, 1), (1, 0), False),
            ((5, 5), (10, 2), False),
        ],
    )
    def test_one_tensor_alone(self, shape, stride, shared):
        tensor = torch.zeros(200).as_strided(shape, stride)
        assert (first_overlap([tensor]) is not None) is shared

    def test_an_expanded_column(self):
        model = nn.Linear(2, 3)
        model.bias = nn.Parameter(torch.zeros(10, 10)[:, 0].expand(3, 10))
        with pytest.raises(ConfigurationError, match="elements of 'bias'"):
            make(model)

    def test_elements_that_begin_within_others(self):
        """Every second element of each, so that whole elements apart they would share nothing."""
        memory = bytearray(64)
        first = torch.frombuffer(memory, dtype=torch.float32, count=8)[::2]
        within = torch.frombuffer(memory, dtype=torch.float32, count=8, offset=6)[::2]
        between = torch.frombuffer(memory, dtype=torch.float32, count=8, offset=4)[::2]
        assert first_overlap([first, within]) is not None
        assert first_overlap([first, between]) is None

    def test_a_parameter_that_is_a_buffer_too(self):
        model = nn.Linear(2, 2)
        model.register_buffer("again", model.weight)
        with pytest.raises(
            ConfigurationError, match="buffer 'again' is the same tensor as parameter 'weight'"
        ):
            make(model)


class TestShapes:
    @pytest.mark.parametrize("buffers", ["mean", "none"])
    def test_buffers_that_have_none_yet(self, buffers):
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))
        with pytest.raises(
            ConfigurationError, match=r"buffer '1\.running_mean' does not have a shape yet"
        ):
            make(model, buffers=buffers)


class TestNames:
    def test_one_that_files_need_for_themselves(self):
        model = nn.Linear(2, 2)
        model.register_parameter("__metadata__", nn.Parameter(torch.ones(1)))
        with pytest.raises(
            ConfigurationError,
            match="parameter '__metadata__' has a name that safetensors reserves",
        ):
            make(model)

    def test_others_are_as_they_are(self, tmp_path):
        """Also what JSON has to escape, and line ends that are none in ASCII."""
        name = 'wé\u2028 "\\x\n'
        model = nn.Module()
        model.register_parameter(name, nn.Parameter(torch.arange(3.0)))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        exchange = connect(tmp_path / "run", rank=0, world_size=1)
        with DiLoCo(model, inner, exchange, sync_every=1):
            model.get_parameter(name).grad = torch.ones(3)
            inner.step()
        export(str(tmp_path / "run"), tmp_path / "model.safetensors")
        assert torch.equal(
            load_file(tmp_path / "model.safetensors")[name], model.get_parameter(name)
        )


class TestOptimizers:
    def test_one_that_only_looks_like_one(self):
        class Wrapper(torch.optim.Optimizer):
            def __init__(self, optimizer):
                self.optimizer, self.param_groups, self.state = (
                    optimizer,
                    optimizer.param_groups,
                    optimizer.state,
                )

            def step(self, closure=None):
                return self.optimizer.step(closure)

        model = nn.Linear(2, 2)
        wrapped = torch.optim.SGD(model.parameters())
        with pytest.raises(
            ConfigurationError,
            match=r"steps of Wrapper cannot be counted.*optimizer that it wraps.*Lookahead.*"
            "leave it out",
        ):
            make(model, Wrapper(wrapped))
        make(model, wrapped)

    def test_steps_that_nobody_sees(self, lab, caplog):
        model, inner, outer = make(lab.fill(nn.Linear(2, 2)))
        inner.step = lambda: None
        with caplog.at_level(logging.WARNING, "diloco_core"), outer:
            lab.push(model, inner, 0, 0)
        assert "without a single step of the inner optimizer" in caplog.text
        caplog.clear()
        model, inner, outer = make(lab.fill(nn.Linear(2, 2)))
        with caplog.at_level(logging.WARNING, "diloco_core"), outer:
            lab.push(model, inner, 0, 0)
        assert caplog.text == ""


class TestComparedValues:
    def test_all_of_a_large_tensor_counts(self, monkeypatch):
        monkeypatch.setattr("diloco_core._model._values._HASHED_AT_ONCE", 4)
        values = torch.zeros(10)
        sums = [checksum(values)]
        for index in range(10):
            changed = values.clone()
            changed[index] = 1.0
            sums.append(checksum(changed))
        assert len(set(sums)) == 11
        monkeypatch.setattr("diloco_core._model._values._HASHED_AT_ONCE", 100)
        assert checksum(values) == sums[0]

    def test_a_buffer_that_is_synced_elsewhere_may_differ(self, lab):
        """The same tensor is persistent in one module, and not in another one."""

        def build(rank):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            table = torch.full((2,), float(rank))
            model[0].register_buffer("table", table)
            model[1].register_buffer("table", table, persistent=False)
            return lab.fill(model)

        assert lab.identical(lab.train(build, in_process(2)))


class TestStateDicts:
    def test_one_that_does_not_take_what_torchs_takes(self):
        class Model(nn.Linear):
            def state_dict(self):
                return {"weight": self.weight}

        with pytest.raises(
            ConfigurationError, match=r"model\.state_dict\(keep_vars=True\), .* fails: TypeError"
        ):
            make(Model(2, 2))


class TestStepsOutside:
    def test_of_any_optimizer_are_noticed(self, lab):
        model = lab.fill(nn.Linear(2, 2))
        two = [torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias])]
        outer = DiLoCo(model, two, in_process(1)[0], sync_every=2)
        lab.push(model, two[1], 0, 0)
        with pytest.raises(
            SyncError,
            match="2 inner steps were taken since this outer loop was made, but its block was ",
        ):
            lab.push(model, two[1], 0, 1)
        assert outer.committed == 0


class TestNumbers:
    def test_too_large_for_a_float(self):
        with pytest.raises(ConfigurationError, match="outer_lr must be a finite number"):
            make(nn.Linear(2, 2), outer_lr=10**400)
        with pytest.raises(ConfigurationError, match="sync_timeout must be a positive number"):
            Timing(sync_timeout=10**400)

    def test_of_numpy_and_paths_in_export(self, tmp_path):
        (tmp_path / "run").mkdir()
        with pytest.raises(RendezvousError):
            export(str(tmp_path / "run"), tmp_path / "model.safetensors", at=np.int64(0))
        for at in (True, 1.0, -1, "0"):
            with pytest.raises(ConfigurationError, match="at must be a number of outer steps"):
                export(str(tmp_path), tmp_path / "model.safetensors", at=at)
        for path in (5, None):
            with pytest.raises(ConfigurationError, match="path must be the name of a file"):
                export(str(tmp_path), path)
