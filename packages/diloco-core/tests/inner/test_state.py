"""A rank that comes back has its inner optimizer, random numbers and place in the data again."""

import copy
import itertools
import random
import shutil

import numpy as np
import pytest
import torch
from loop_lab import exchanges, live, loop
from safetensors import safe_open
from simulated import Schedule, simulate
from training_lab import Loader

from diloco_core import CorruptedObjectError, DiLoCo, Elastic
from diloco_core._inner._file import check_inner
from diloco_core._inner._state import InnerState
from diloco_core._run._records._keys import inner_key


def _train(place, syncs, loader=None, *, rank=0, ranks=1, every=10, stop=None, stops=None):
    """Train up to a sync; be killed after an inner step, or before a sync is finished."""
    torch.manual_seed(5)
    net, loader = torch.nn.Linear(3, 2), loader or Loader()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    (exchange,) = exchanges("elastic", ranks, place, ranks=[rank], least=1, grace=1.0)
    options = {"save_inner_every": every}
    if every:
        options["stateful"] = {"loader": loader}
    options["on_sync"] = lambda report: loader.reports.append(
        (report.sync, outer.committed, loader.position)
    )
    begin, loader.reports = exchange.begin, []

    def interrupted(job, **given):
        pending = begin(job, **given)
        if outer.committed + 1 == stops:
            pending.finish = lambda: _kill()
        return pending

    exchange.begin = interrupted
    _, _, outer, _ = loop(exchange, net, inner, **options)
    noise = []
    with outer:
        for _ in range(outer.batches_to_skip):
            next(loader)
        while outer.committed < syncs:
            if outer.inner_steps == stop:
                _kill()
            noise.append((torch.rand(1).item(), random.random(), np.random.rand()))
            net(next(loader)).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
    return net, inner, noise, outer


def _kill():
    raise KeyboardInterrupt


def test_a_run_in_two_parts_is_the_run_in_one(tmp_path):
    whole_loader, parts_loader = Loader(), Loader()
    random.seed(1), np.random.seed(1)
    whole, whole_inner, whole_noise, _ = _train(tmp_path / "a", 6, whole_loader)
    random.seed(1), np.random.seed(1)
    _, _, first_noise, _ = _train(tmp_path / "b", 3)
    net, inner, noise, outer = _train(tmp_path / "b", 6, parts_loader)
    assert outer.batches_to_skip == 0
    assert whole_noise == first_noise + noise
    assert parts_loader.seen == whole_loader.seen == list(range(1, 13))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), net.parameters(), strict=True))
    for here, there in zip(inner.state.values(), whole_inner.state.values(), strict=True):
        assert all(torch.equal(here[name], there[name]) for name in there)


def test_what_was_counted_since_the_last_saving_is_to_be_passed_over(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path, 9, every=2, stop=9)  # killed after sync 4, saved at syncs 1 and 3
    loader = Loader()
    assert _train(tmp_path, 6, loader, every=2)[-1].batches_to_skip == 2
    # Steps 7 and 8 are counted already; the 9th was never done.
    assert loader.seen == list(range(1, 13))


def test_what_is_counted_while_an_incarnation_begins_is_passed_over_and_its_state_is_saved_later(
    tmp_path, caplog
):
    """The incarnation before it had contributed to sync 4, and ended before that was decided."""
    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path, 9, stops=4)
    loader = Loader()
    assert _train(tmp_path, 6, loader)[-1].batches_to_skip == 6  # one sync was saved
    # Not (4, ...): the caller has no loop yet when that sync is adopted, and the loader does not
    # stand where it stood.
    assert loader.reports == [(5, 5, 10), (6, 6, 12)]
    assert loader.seen == list(range(1, 13))
    assert "an earlier incarnation of this rank took and this one did not" not in caplog.text
    # The data loader stands where the counted steps end.
    assert (tmp_path / inner_key(0, 2, 6)).exists()


def test_several_optimizers_are_all_saved(tmp_path):
    def incarnation(steps):
        net = torch.nn.Linear(3, 2)
        adamw = torch.optim.AdamW([net.weight], lr=0.1)
        inner = [adamw, torch.optim.SGD([net.bias], lr=0.1, momentum=0.9)]
        _, _, outer, _ = loop(*exchanges("elastic", 1, tmp_path, grace=1.0), net, inner)
        with outer:
            restored = [copy.deepcopy(list(each.state.values())) for each in inner]
            while outer.inner_steps < steps:
                net(torch.ones(4, 3)).sum().backward()
                [optimizer.step() for optimizer in inner]
        return restored, [list(each.state.values()) for each in inner]

    _, saved = incarnation(4)
    restored, _ = incarnation(5)
    for (wanted,), (found,) in zip(saved, restored, strict=True):
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.parametrize("fused", [True, False])
def test_state_is_laid_out_in_memory_as_the_parameters_are(tmp_path, fused):
    def incarnation(name, steps):
        torch.manual_seed(5)
        layers = torch.nn.Conv2d(4, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3)
        net = torch.nn.Sequential(*layers)
        net.to(memory_format=torch.channels_last)
        net[2].weight = torch.nn.Parameter(net[2].weight.detach().t().contiguous().t())
        inner = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
        # Some optimizers keep more than the state of parameters.
        inner.state["calls"] = {"of": steps}
        (exchange,) = exchanges("elastic", 1, tmp_path / name, grace=1.0)
        with DiLoCo(net, inner, exchange, sync_every=1, save_inner_every=1) as outer:
            while outer.inner_steps < steps:
                torch.manual_seed(outer.inner_steps)
                net(torch.randn(5, 4, 3, 3)).square().sum().backward()
                inner.step()
                inner.zero_grad()
        return net, inner

    incarnation("parts", 2)
    (whole, _), (parts, inner) = incarnation("whole", 6), incarnation("parts", 6)
    for wanted, found in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(wanted, found)
        assert inner.state[found]["exp_avg"].stride() == found.stride()


def test_settings_that_are_tensors_stay_on_their_device():
    """A capturable optimizer has its learning rate on the GPU, where a captured step reads it."""
    net = torch.nn.Linear(3, 2)
    inner = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.25))
    saved = b"".join(map(bytes, InnerState([inner], {}).parts(1, "run")))
    for device in ("cpu", "meta"):
        inner.param_groups[0]["lr"] = torch.tensor(0.5, device=device)
        InnerState([inner], {}).restore(saved, "run", "the file")
        assert inner.param_groups[0]["lr"].device.type == device
        assert device == "meta" or inner.param_groups[0]["lr"] == 0.25


def test_every_rank_has_its_own_and_only_the_newest_is_kept(tmp_path):
    _train(tmp_path, 3, ranks=2, every=1)
    (kept,) = (tmp_path / "inner" / "00000").iterdir()
    assert kept.name == "0001.00000003.safetensors"
    with safe_open(kept, "pt") as file:
        assert "xxh3" in file.keys()  # noqa: SIM118 - no mapping
    other = Loader()
    assert _train(tmp_path, 6, other, rank=1, ranks=2)[-1].batches_to_skip == 0
    assert other.seen[0] == 1


@pytest.mark.parametrize("gone", [False, True])
def test_where_none_is_there_it_is_said(tmp_path, caplog, gone):
    if gone:
        _train(tmp_path, 3)
        shutil.rmtree(tmp_path / "inner")
    else:
        with pytest.raises(KeyboardInterrupt):
            _train(tmp_path, 9, every=0, stop=7)  # killed without ever having saved
    assert "fresh inner state" not in caplog.text
    _train(tmp_path, 6)
    text = "continues with a fresh inner state, because the store holds no inner state of this rank"
    assert text in caplog.text
    assert "has to skip the 6 batches" in caplog.text


def _flip(data):
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


class TestDamage:
    def test_it_is_said_and_the_rank_goes_on_where_it_was_with_a_fresh_one(self, tmp_path, caplog):
        _train(tmp_path, 3)
        (kept,) = (tmp_path / "inner" / "00000").iterdir()
        kept.write_bytes(_flip(kept.read_bytes()))
        loader = Loader()
        assert _train(tmp_path, 6, loader)[-1].batches_to_skip == 6
        assert "inner state is damaged" in caplog.text
        assert loader.seen == list(range(1, 13)), "none is learned twice"

    @pytest.mark.parametrize("harm", ["a bit", "another key"])
    def test_what_was_saved_before_is_taken_where_it_is_still_there(self, tmp_path, caplog, harm):
        """Damage the newer one, or make it the whole content of another key."""
        folder = tmp_path / "inner" / "00000"
        _train(tmp_path, 2)
        (older,) = folder.iterdir()
        content = older.read_bytes()
        _train(tmp_path, 4)
        (newer,) = folder.iterdir()
        newer.write_bytes(_flip(newer.read_bytes()) if harm == "a bit" else content)
        older.write_bytes(content)  # as when a replica dies while it saves
        assert _train(tmp_path, 6)[-1].batches_to_skip == 4
        assert "inner state is damaged" in caplog.text
        text = "rank 0: restored the inner state that was saved after sync 2 instead. Skip 4 batch"
        assert text in caplog.text

    @pytest.mark.parametrize("step", [101, pytest.param(1, marks=pytest.mark.slow)])
    def test_every_bit_and_every_truncation_is_noticed(self, step):
        model = torch.nn.Linear(3, 2)
        data = bytearray().join(
            InnerState([torch.optim.SGD(model.parameters(), lr=0.1)], {}).parts(3, "inner/a")
        )
        check_inner(bytes(data), "inner/a", "x")
        for bit in range(0, 8 * len(data), step):
            data[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptedObjectError):
                check_inner(bytes(data), "inner/a", "x")
            data[bit // 8] ^= 1 << bit % 8
        for size in range(0, len(data), step):
            with pytest.raises(CorruptedObjectError):
                check_inner(bytes(data[:size]), "inner/a", "x")


def test_nothing_is_saved_while_what_was_learned_is_still_to_be_counted():
    """Else a loader that is restored would stand behind batches that were never counted."""
    incarnations = {}

    def train(node):
        net, loader = torch.nn.ParameterList([torch.zeros(4)]), Loader()
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        options = {"stateful": {"loader": loader}, "save_inner_every": 1}
        with DiLoCo(net, inner, node.exchange, sync_every=2, **options) as outer:
            stands = outer.inner_steps, outer.batches_to_skip, loader.position
            incarnations[node.rank, node.incarnation] = stands
            while outer.committed < 8:
                first = (node.rank, node.incarnation) == (1, 1)
                if first and outer.inner_steps == 7:
                    raise RuntimeError("crash")
                # Late: steps 5 and 6 are carried.
                node.sleep(9.0 if first and outer.inner_steps == 5 else 1.0)
                next(loader)
                net[0].grad = torch.ones(4)
                inner.step()

    simulate(train, Schedule(3, restart_after=1.0), Elastic(2, grace=4.0))
    steps, skip, position = incarnations[1, 2]
    assert steps == 4
    assert position + skip == steps, "the loader stands where the counted steps end"


def skips(place, caplog, scheduled=False, **options):
    """An incarnation of three syncs; how many batches it says to skip, and what it logs of that."""
    net = torch.nn.Linear(3, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    if scheduled:
        options["stateful"] = {"scheduler": torch.optim.lr_scheduler.StepLR(inner, 1)}
    _, _, outer, _ = loop(*exchanges("elastic", 1, place, grace=1.0), net, inner, **options)
    with outer:
        caplog.clear()
        skip = {outer.batches_to_skip, outer.batches_to_skip}
        wanted = outer.committed + 3
        while outer.committed < wanted:
            net(torch.ones(4, 3)).sum().backward()
            inner.step()
    return skip, list(caplog.messages)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_loader_that_is_not_saved_is_warned_of_once_by_whoever_asks(tmp_path, caplog, scheduled):
    """A loader that starts anew would give earlier batches again."""
    assert skips(tmp_path, caplog, scheduled) == ({0}, [])
    skip, (warning,) = skips(tmp_path, caplog, scheduled)
    assert skip == {0}
    assert "The 6 batches before that are not counted" in warning
    assert "pass it in stateful=, or choose batches by outer.inner_steps" in warning


@pytest.mark.parametrize("kind", ["elastic", "store"])
class TestTheFirstSave:
    def incarnation(self, place, kind, stop, given=None, *, resume=False):
        """Train until a sync, and be killed there; return the saves after each sync."""
        model, saves = torch.nn.Linear(3, 1), []
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        if given is not None:
            inner.load_state_dict(given)

        def on_sync(report):
            saves.append({path.name for path in place.glob("inner/*/*")})
            if report.sync == stop:
                _kill()

        options = {"save_inner_every": 3, "on_sync": on_sync}
        _, _, outer, _ = loop(*exchanges(kind, 1, place, resume=resume), model, inner, **options)
        with pytest.raises(KeyboardInterrupt):
            live(model, inner, outer, *range(100))
        return saves, inner.state_dict()

    def test_comes_at_the_first_sync(self, tmp_path, kind):
        saves, _ = self.incarnation(tmp_path, kind, 9)
        changed = [bool(now - before) for before, now in itertools.pairwise(saves)]
        assert changed == [True, False, False, True, False, False, True, False], "syncs 1, 4 and 7"

    def test_an_optimizer_that_has_state_is_not_said_to_begin_anew(self, tmp_path, kind, caplog):
        _, state = self.incarnation(tmp_path, kind, 2)
        for stop, given in ((4, None), (6, state)):
            shutil.rmtree(tmp_path / "inner")
            caplog.clear()
            self.incarnation(tmp_path, kind, stop, given, resume=True)
            (said,) = [line for line in caplog.messages if "fresh inner state" in line]
            keep = "The optimizers keep the state that they were given; the"
            assert (keep if given else "The optimizers, the random generators") in said
