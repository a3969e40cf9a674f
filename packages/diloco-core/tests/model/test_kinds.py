"""Tensors and optimizers that cannot be synced or counted are refused by name."""

import pytest
import torch
from loop_lab import live, loop
from safetensors.torch import load_file
from torch import nn

from diloco_core import ConfigurationError, ModelChangedError, connect, export, in_process


def refused(message, model, inner=None, **options):
    with pytest.raises(ConfigurationError, match=message):
        loop(None, model, inner, **options)


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
        model, inner, outer, _ = loop(None, lab.fill(Counting()))
        infer = torch.inference_mode()(lambda model: model(torch.zeros(1, 2)))
        text = r"'seen' was made inside torch.inference_mode.*no_grad"
        with pytest.raises(ModelChangedError, match=text) as caught:
            live(model, inner, outer, infer, 0)
        assert caught.value.tensor == "seen"

    def test_a_model_or_a_loop_that_is_made_in_it(self):
        with torch.inference_mode():
            model = nn.Linear(2, 2)
        refused("parameter 'weight' was made inside", model)
        model = nn.Linear(2, 2)
        with torch.inference_mode():
            model.register_buffer("table", torch.ones(2))
            refused("cannot be made inside", model)
        refused("buffer 'table' is a tensor that was made inside", model)
        assert loop(None, model, buffers="none")

    def test_a_flush_in_it_leaves_nothing_behind(self, lab):
        """The outer optimizer's state is made by the first sync, and written by the second one."""

        def run(mode):
            adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)  # noqa: E731
            model, inner, outer, _ = loop(sync_every=3, outer_optimizer=adamw)
            with outer:
                lab.push(model, inner, 0, 0)
                with mode:
                    outer.flush()
                for step in range(4):
                    lab.push(model, inner, 0, step)
            return lab.values(model)

        assert lab.identical([run(torch.inference_mode()), run(torch.no_grad())])


def tensors(*each):
    return nn.ParameterList([nn.Parameter(one, not one.is_meta) for one in each])


class TestMemory:
    def shares(self, *each):
        try:
            loop(None, tensors(*each))
        except ConfigurationError as error:
            assert "share memory" in str(error)  # noqa: PT017
            return True
        return False

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
        assert self.shares(torch.zeros(200).as_strided(shape, stride)) is shared

    def test_several_are_compared_range_by_range(self):
        flat = torch.zeros(100)
        parts = [flat[index * 10 : index * 10 + 10] for index in (3, 0, 7, 9, 1)]
        columns = flat[:50].view(5, 10)
        for apart in (
            parts,
            [*parts, flat[20:30], torch.empty(0), torch.empty(3, device="meta")],
            [flat[::2], flat[1:20:2], flat[21:40:2]],  # behind a range longer than the next ones
            [columns[:, :5], columns[:, 5:]],
        ):
            assert not self.shares(*apart)
        for together in (
            [*parts, flat[5:6]],
            [flat[::2], flat[1:20:2], flat[22:40:2]],
            [columns[:, :6], columns[:, 5:]],
        ):
            assert self.shares(*together)

    def test_elements_that_begin_within_others(self):
        """Every second element of each, so that whole elements apart they would share nothing."""
        memory = bytearray(64)
        first, within, between = (
            torch.frombuffer(memory, dtype=torch.float32, count=8, offset=offset)[::2]
            for offset in (0, 6, 4)
        )
        assert self.shares(first, within)
        assert not self.shares(first, between)

    def test_a_parameter_that_is_a_buffer_too(self):
        model = nn.Linear(2, 2)
        model.register_buffer("again", model.weight)
        refused("buffer 'again' is the same tensor as parameter 'weight'", model)


def test_names_that_files_need_for_themselves_and_others(tmp_path):
    """Others may be long, and hold what JSON has to escape, and line ends that ASCII has not."""
    model = nn.Linear(2, 2)
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(1)))
    refused("parameter '__metadata__' has a name that safetensors reserves", model)
    name, model = 'wé\u2028 "\\x\n' * 10_000, nn.Module()
    model.register_parameter(name, nn.Parameter(torch.arange(3.0)))
    exchange = connect(tmp_path / "run", rank=0, world_size=1)
    _, inner, outer, _ = loop(exchange, model, sync_every=1)
    with outer:
        model.get_parameter(name).grad = torch.ones(3)
        inner.step()
    export(str(tmp_path / "run"), tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")[name], model.get_parameter(name))


@pytest.mark.parametrize("buffers", ["mean", "none"])
def test_buffers_that_have_no_shape_yet(buffers):
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))
    refused(r"buffer '1\.running_mean' does not have a shape yet", model, buffers=buffers)


def test_a_state_dict_that_does_not_take_what_torchs_takes():
    class Model(nn.Linear):
        def state_dict(self):
            return {"weight": self.weight}

    refused(r"model\.state_dict\(keep_vars=True\), .* fails: TypeError", Model(2, 2))


class TestOptimizers:
    def test_one_that_only_looks_like_one(self):
        class Wrapper(torch.optim.Optimizer):
            def __init__(self, inner):
                self.optimizer = inner
                self.param_groups, self.state = inner.param_groups, inner.state

            def step(self, closure=None):
                return self.optimizer.step(closure)

        model = nn.Linear(2, 2)
        wrapped = torch.optim.SGD(model.parameters())
        text = "steps of Wrapper cannot be counted.*optimizer that it wraps.*Lookahead.*leave it ou"
        refused(text, model, Wrapper(wrapped))
        assert loop(None, model, wrapped)


def test_a_buffer_that_is_synced_elsewhere_may_differ(lab):
    """The same tensor is persistent in one module, and not in another one."""

    def build(rank):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        table = torch.full((2,), float(rank))
        model[0].register_buffer("table", table)
        model[1].register_buffer("table", table, persistent=False)
        return lab.fill(model)

    assert lab.identical(lab.train(build, in_process(2)))
