"""The outer loop's arguments ``state_codec`` and ``full_state_every``."""

import functools
import shutil

import pytest
import torch
from codecs_lab import CODECS, DENSE, over_store
from damage_lab import flip, late_bit
from safetensors.torch import load_file
from training_lab import fill, identical, push, run, train, until

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    DivergedError,
    ManagerExchange,
    MockManager,
    NonFiniteUpdateError,
    export,
    in_process,
)

INT8 = {"state_codec": "int8", "full_state_every": 3}
IN_THREADS = {"state_codec": "int8"}  # they keep no state


def make(rank=0):
    """With buffers, which are published as they are, and sizes that fit no block."""
    layers = torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 7)
    return fill(torch.nn.Sequential(*layers))


#: The others are waited for less long than usually.
SOON = {"lost_after": 4.0, "beat_interval": 1.0}


def each_until(last, exchanges, **options):
    """Train all replicas up to a number of inner steps; what each model holds."""
    return run(lambda each: until(make, each, last, **{"flush": "none", **options}), exchanges)


@pytest.mark.sampled
@pytest.mark.parametrize("name", DENSE)
def test_all_hold_the_same_and_end_near_the_plain_run(name, tmp_path):
    plain = train(make, in_process(2), steps=8)[0]
    threads = train(make, in_process(2), steps=8, state_codec=name)
    options = {"steps": 8, "state_codec": name, "full_state_every": 2}
    store = train(make, over_store(tmp_path / "fixed"), **options)
    elastic = train(make, over_store(tmp_path / "elastic", min_replicas=2), **options)
    assert identical([*threads, *store, *elastic])
    starts = dict(make().named_parameters())
    moved = torch.cat([(plain[key] - start).flatten() for key, start in starts.items()])
    off = torch.cat([(plain[key] - threads[0][key]).flatten() for key in starts])
    assert off.norm() < (1e-6 if name == "fp32" else 0.3) * moved.norm()  # the sum is rounded
    assert bool(off.any())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("fragments", "every", "membership"),
    [(1, 1, {}), (1, 3, {}), (2, 1, {}), (2, 3, {}), (1, 3, {"min_replicas": 2})],
)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(fragments, every, membership, tmp_path):
    """Wherever it stopped: the newest whole state, and the updates since; so does ``export``."""
    options = {"state_codec": "e2m1", "full_state_every": every, "fragments": fragments}
    whole = each_until(14, over_store(tmp_path / "whole"), **options)
    for last in range(2, 15, 2):
        parts = over_store(tmp_path / "parts", resume=last > 2, **membership)
        ends = each_until(last, parts, **options)
        export(tmp_path / "parts", tmp_path / "model.safetensors")
        assert identical([load_file(tmp_path / "model.safetensors"), ends[0]])
    assert identical([*whole, *ends])


def test_a_loop_that_was_saved_keeps_its_residual():
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = DiLoCo(model, inner, in_process(1)[0], sync_every=2, flush="none", **IN_THREADS)
    with outer:
        for step in range(4):
            push(model, inner, 0, step)
        state = outer.state_dict()
        entries = [entry["tensors"] for entry in state["fragments"][0]["outer"]["ranges"]]
        assert all({"momentum_buffer", "update_residual"} == entry.keys() for entry in entries)
        assert any(entry["update_residual"].any() for entry in entries)


def shards(folder, sync):
    return sorted((folder / "state" / f"{sync:08}").glob("*.safetensors"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Runs that have stopped after four and five outer steps."""
    folder = tmp_path_factory.mktemp("stopped")
    for syncs in (4, 5):
        each_until(2 * syncs, over_store(folder / str(syncs)), **INT8)
    return folder


def with_damage(stopped, folder, sync, place):
    """Resume a copy of a stopped run, with a wrong bit in rank 1's shard of a sync."""
    shutil.copytree(stopped / "5", folder, dirs_exist_ok=True)
    path = shards(folder, sync)[1]
    content = path.read_bytes()
    path.write_bytes(flip(content, int(8 * len(content) * place)))
    return over_store(folder, resume=True, **SOON)


@pytest.mark.sampled
@pytest.mark.parametrize(("sync", "place"), [(3, 0.95), (4, 0.95), (5, 0.05), (5, 0.5), (5, 0.95)])
def test_damage_is_found(sync, place, stopped, tmp_path):
    """In the header, outer state, update or values, in the whole state or an update after it."""
    exchanges = with_damage(stopped, tmp_path, sync, place)
    with pytest.raises(BaseExceptionGroup) as caught:
        each_until(12, exchanges, **INT8)
    errors = [str(e) for e in caught.value.exceptions if isinstance(e, CorruptedObjectError)]
    assert errors
    assert f"{sync:08}" in errors[0]


def test_older_outer_state_is_not_needed(stopped, tmp_path):
    """Of the objects before the newest one, only the values and updates are."""
    exchanges = with_damage(stopped, tmp_path, 4, 0.5)
    undisturbed = over_store(shutil.copytree(stopped / "5", tmp_path / "again"), resume=True)
    ends = [each_until(12, each, **INT8) for each in (exchanges, undisturbed)]
    assert identical([*ends[0], *ends[1]])


def test_a_run_and_an_export_go_back_before_a_damaged_update(stopped, tmp_path):
    shutil.copytree(stopped / "4", tmp_path / "until 8")
    shutil.copytree(stopped / "5", tmp_path / "run")
    path = shards(tmp_path / "run", 5)[0]
    path.write_bytes(late_bit(path.read_bytes()))
    for folder in ("until 8", "run"):
        export(tmp_path / folder, tmp_path / f"{folder}.safetensors")
    before, after = (load_file(tmp_path / f"{name}.safetensors") for name in ("until 8", "run"))
    assert identical([before, after])
    again = over_store(tmp_path / "run", resume="newest-whole", **SOON)
    ends = each_until(12, again, **INT8)
    assert identical(ends)


@pytest.mark.sampled
@pytest.mark.parametrize("membership", [{}, {"min_replicas": 2, "grace": 2.0}])
def test_a_damaged_update_is_written_again(membership, tmp_path, monkeypatch):
    """A replica that finds an update damaged adds nothing, and asks its owner to write it again."""
    undamaged = train(make, in_process(2), steps=8, **IN_THREADS)
    exchanges, damaged = over_store(tmp_path, **membership), []
    store, create = exchanges[0].store, exchanges[0].store.create

    def damages(key, parts):
        """The first update is written wrongly."""
        content = parts if isinstance(parts, bytes) else b"".join(map(bytes, parts))
        if key.startswith("state/00000002") and not damaged:
            damaged.append(key)
            content = late_bit(content)
        return create(key, [content])

    monkeypatch.setattr(store, "create", damages)
    ends = train(make, exchanges, steps=8, **INT8)
    assert damaged
    assert identical([*undamaged, *ends])


@pytest.mark.parametrize(
    ("return_within", "advice"),
    [(0, "start all of its ranks again with resume=True"), (0.5, "Start this replica again")],
)
def test_replicas_that_held_different_values_notice(return_within, advice, tmp_path):
    """The update that both add is not damaged; the sum is not the owner's."""

    def one(exchange):
        model = make()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=2, **INT8) as outer:
            for step in range(6):
                if step == 2 and exchange.rank == 1:
                    max(outer._fragments[0].copy, key=len)[3] += 1e-3  # the parameters
                push(model, inner, exchange.rank, step)

    with pytest.raises(BaseExceptionGroup) as caught:
        run(one, over_store(tmp_path, return_within=return_within))
    diverged = [e for e in caught.value.exceptions if isinstance(e, DivergedError)]
    assert diverged
    assert all(advice in str(error) for error in diverged)


def test_an_update_that_is_not_finite_is_not_published(tmp_path):
    options = {"sync_every": 1, "outer_lr": 3e38, **INT8}
    with pytest.raises(BaseExceptionGroup) as caught:
        each_until(9, over_store(tmp_path), **options)
    assert any(isinstance(error, NonFiniteUpdateError) for error in caught.value.exceptions)


def refused(pattern, exchange=None, **options):
    model = make()
    exchange = exchange or in_process(1)[0]
    with pytest.raises(ConfigurationError, match=pattern):
        DiLoCo(model, torch.optim.SGD(model.parameters()), exchange, sync_every=1, **options)


def test_what_does_not_fit_is_refused(tmp_path):
    refused("state_codec must be one of plain, fp32, .*e2m1, not 'int9'", state_codec="int9")
    refused("not an Int8.*can only be given as codec", state_codec=CODECS["int8"])
    refused("full_state_every=4 needs a state_codec", full_state_every=4)
    refused("full_state_every must be", state_codec="int8", full_state_every=0)
    adam = functools.partial(torch.optim.Adam, lr=0.1)
    refused("with the outer optimizer Adam", state_codec="int8", outer_optimizer=adam)
    managed = ManagerExchange(MockManager(in_process(1)[0]))
    refused("with ManagerExchange, which does not publish encoded", managed, state_codec="int8")
    (elastic,) = over_store(tmp_path / "run", 1, min_replicas=1, topology="gather")
    text = "cannot be used with topology='gather'.*use topology='sharded'"
    refused(text, elastic, state_codec="int8")
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())
