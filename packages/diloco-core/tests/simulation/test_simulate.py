"""Simulated replicas learn what real ones do, and settings are compared by what they would cost."""

import itertools
import json
import random
import signal
import threading

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from training_lab import identical, values
from warm_processes import WarmProcess

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    MismatchError,
    connect,
    plan_exchange,
    simulate,
)

STEPS = 10
DELAYED = {"sync_every": 4, "fragments": 2, "delay": 1, "alpha": 0.5, "outer_lr": 0.4}
ENCODED = {"sync_every": 3, "codec": "int8", "error_feedback": True, "state_codec": "bf16"}


def model_fn():
    """A model whose initial values, and whose steps, are drawn from torch's own generator."""
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))


def data_fn(rank):
    while True:
        x = torch.randn(6, 4)
        yield rank, x, x.sum(1, keepdim=True)


def optimizer_fn(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def loss_fn(model, batch):
    _, x, y = batch
    return (model(x) - y).square().mean()


def real(folder, rank, world_size, setting):
    """Train as a process of its own would, which begins with seeds as :func:`simulate` tells."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = model_fn()
    optimizer = optimizer_fn(model)
    torch.manual_seed(7 + rank)
    exchange = connect(f"{folder}/run", rank=rank, world_size=world_size)
    losses, batches = [], data_fn(rank)
    with DiLoCo(model, optimizer, exchange, **setting) as outer:
        for _ in range(STEPS):
            loss = loss_fn(model, next(batches))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    result = {"losses": losses, "model": model.state_dict(), "syncs": outer.committed}
    torch.save(result, f"{folder}/{rank}.pt")


def simulated(setting, replicas, **more):
    """The rows of a simulation, the losses of all replicas, and the model that they end with."""
    losses, ends = [[] for _ in range(replicas)], []

    def noted(model, batch):
        loss = loss_fn(model, batch)
        losses[batch[0]].append(loss.item())
        return loss

    def evaluate(model):
        ends.append(values(model))
        return 0.25

    options = {"optimizer_fn": optimizer_fn, "steps": STEPS, "seed": 7, "replicas": replicas}
    options |= {"settings": [setting], "loss_fn": noted, "evaluate": evaluate}
    rows = simulate(model_fn, data_fn, **options, **more)
    return rows, losses, ends[0]


@pytest.fixture
def one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("setting", [{"sync_every": 3}, DELAYED, ENCODED])
@pytest.mark.usefixtures("one_core")
def test_it_is_what_real_processes_do_to_the_bit(tmp_path, setting):
    running = [WarmProcess(tmp_path / f"{n}", real, str(tmp_path), n, 3, setting) for n in range(3)]
    assert [process.communicate()[::2] for process in running] == [(0, "")] * 3
    reals = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    rows, losses, end = simulated(setting, 3)
    assert losses == [process["losses"] for process in reals]
    assert identical([end, *(process["model"] for process in reals)])
    assert rows[0]["syncs"] == reals[0]["syncs"]


def test_it_is_the_same_every_time_and_leaves_the_generators_alone():
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = states()
    _, losses, end = simulated(DELAYED, 3)
    torch.randn(3)
    _, again, other = simulated(DELAYED, 3)
    assert losses == again
    assert identical([end, other])
    assert losses[0] != losses[1], "each replica draws its own numbers"
    torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
    simulated({"sync_every": 5}, 2)
    assert states() == before


def test_one_replica_runs_at_a_time_and_nothing_stays():
    busy, most = [], []

    def alone(model, batch):
        busy.append(batch[0])
        most.append(len(busy))
        loss = loss_fn(model, batch)
        busy.pop()
        return loss

    threads = set(threading.enumerate())
    options = {"steps": 6, "settings": [{"sync_every": 2}] * 2, "loss_fn": alone}
    first, second = simulate(model_fn, data_fn, replicas=3, **options)
    assert first == second
    assert len(most) == 36
    assert max(most) == 1
    assert not [one for one in set(threading.enumerate()) - threads if "simul" in one.name]
    assert not any("diloco-simulated" in key for key in MemoryFileSystem.store)


def test_rows_have_the_loss_and_what_the_planned_run_costs():
    plans = {"params": 1e9, "bandwidth": 1e8, "step_seconds": 2.0, "hourly_price": 3.0}
    setting = {"sync_every": 4, "fragments": 2, "delay": 1, "codec": "int8"}
    rows, _, _ = simulated(setting, 3, **plans)
    plan = plan_exchange(1e9, 3, 1e8, fragments=2, fixed=True, codec="int8")
    (row,) = rows
    assert row["loss"] == 0.25
    assert row["syncs"] == 6, "four in the period, and two at the end"
    seconds = STEPS * 2.0 + 6 * plan.exposed(2.0)
    expected = {
        "bytes_sent": 6 * plan.bytes_sent,
        "seconds": seconds,
        "cost": 6 * plan.cost + 3 * seconds / 3600 * 3.0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert json.loads(json.dumps(rows)) == [dict(row, setting=setting)]


def test_without_an_evaluation_the_loss_is_that_of_the_last_steps():
    seen = []

    def noted(model, batch):
        loss = loss_fn(model, batch)
        seen.append(loss.item())
        return loss

    (row,) = simulate(
        model_fn, data_fn, steps=30, settings=[{"sync_every": 30}], replicas=2, loss_fn=noted
    )
    last = [*seen[-6:]]  # they step in turn
    assert row["loss"] == pytest.approx(sum(last) / 6)


def test_it_prints_a_table():
    rows = simulate(
        model_fn,
        data_fn,
        steps=4,
        settings=[{"sync_every": 2}, {"sync_every": 4, "codec": "bf16"}],
        replicas=2,
        loss_fn=loss_fn,
        evaluate=lambda _: 1.5,
        params=1e9,
    )
    assert str(rows).splitlines() == [
        "| setting                    |   loss | syncs | GB sent |   hours |        $ |",
        "| -------------------------- | -----: | ----: | ------: | ------: | -------: |",
        "| sync_every=2               | 1.5000 |     2 |      12 | 0.00904 |   0.0112 |",
        "| sync_every=4, codec='bf16' | 1.5000 |     1 |       5 | 0.00472 |  0.00348 |",
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"settings": []}, r"must be a list of mappings .*, and not \[\]"),
        ({"settings": {"sync_every": 5}}, "must be a list of mappings"),
        ({"settings": [{"codec": "int8"}]}, "and not \\[{'codec'"),
        ({"settings": [{"sync_every": 5}, {"sync_every": 5, "H": 3}]}, "and not H"),
        ({"settings": [{"sync_every": 5, "on_sync": print}]}, "and not on_sync"),
        ({"settings": [{"sync_every": 5, "min_replicas": 1}]}, "and not min_replicas"),
        ({"steps": 0}, "steps must be"),
        ({"replicas": 0}, "replicas must be"),
        ({"seed": -1}, "seed must be"),
        ({"step_seconds": 0}, "step_seconds must be"),
        ({"hourly_price": -1}, "hourly_price must be"),
    ],
)
def test_what_is_wrong_is_refused_by_name_before_anything_is_made(wrong, words):
    options = {"steps": 4, "settings": [{"sync_every": 2}], **wrong}
    with pytest.raises(ConfigurationError, match=words):
        simulate(lambda: pytest.fail("a model was made"), data_fn, **options)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"sync_every": 0}, "sync_every must be"),
        ({"sync_every": 5, "codec": "int9"}, "codec"),
        ({"sync_every": 5, "delay": 5}, "delay"),
        ({"sync_every": 5, "outer_lr": -1.0}, "outer_lr|learning rate"),
    ],
)
def test_what_the_outer_loop_refuses_is_refused_before_any_setting_is_tried(setting, words):
    settings = [{"sync_every": 5}, setting]
    with pytest.raises(ConfigurationError, match=words):
        simulate(model_fn, lambda _: pytest.fail("trained"), steps=5, settings=settings)


def test_too_few_batches_and_other_errors_end_all_replicas():
    settings = [{"sync_every": 5}]
    few = {"steps": 5, "settings": settings, "replicas": 3, "loss_fn": loss_fn}

    def short(rank):
        return [next(data_fn(rank)) for _ in range(5 - (rank == 1))]

    with pytest.raises(ConfigurationError, match=r"data_fn\(1\) has fewer than 5 batches"):
        simulate(model_fn, short, **few)

    def failing(rank):
        yield next(data_fn(rank))
        raise ArithmeticError(f"batch of rank {rank}")

    with pytest.raises(ArithmeticError, match="batch of rank 0"):
        simulate(model_fn, failing, **few)
    assert not [thread for thread in threading.enumerate() if "simul" in thread.name]


def test_models_that_differ_are_refused():
    shifts = itertools.count()

    def another():
        model = model_fn()
        torch.nn.init.constant_(next(model.parameters()), next(shifts))
        return model

    settings = [{"sync_every": 5}]
    with pytest.raises(MismatchError, match="differ in tensor") as refused:
        simulate(another, data_fn, steps=5, settings=settings, replicas=2, loss_fn=loss_fn)
    assert "model_fn must make the same model" in refused.value.__notes__[0]


def test_ctrl_c_ends_all_replicas():
    taken = []

    def interrupted(model, batch):
        taken.append(batch[0])
        if len(taken) == 4:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return loss_fn(model, batch)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    settings = [{"sync_every": 50}]
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate(model_fn, data_fn, steps=10**6, settings=settings, loss_fn=interrupted)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any("diloco-simulated" in key for key in MemoryFileSystem.store)
