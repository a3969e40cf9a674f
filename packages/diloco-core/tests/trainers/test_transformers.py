"""Replicas that are trained by Hugging Face's ``Trainer``."""

import functools
import inspect
import json
import logging
import os
import subprocess
import sys

import pytest
import replica
import torch
import transformers
from transformers import Trainer, TrainerCallback

from diloco_core import ConfigurationError, DiLoCo, SyncError, connect
from diloco_core.transformers import DiLoCoCallback

pytestmark = pytest.mark.trainers

KILLED, TERMINATED = -9, 143


def start(folder, rank=0, world=1, processes=1, **wanted):
    folder.mkdir(exist_ok=True)
    command = [replica.__file__, str(folder), json.dumps(wanted)]
    if processes > 1:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
        command = [*torchrun, str(processes), *command]
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "REPLICA_RANK": str(rank), "REPLICA_WORLD_SIZE": str(world)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder, code=0, **wanted):
    """Run a lone replica in a process; returns what it wrote and what it ended with."""
    process = start(folder, **wanted)
    output, _ = process.communicate()
    assert process.returncode == code, output
    end = folder / "end-0.json"
    return output, json.loads(end.read_text()) if end.exists() else None


@pytest.fixture
def lone(monkeypatch):
    """Trains a lone replica in this process."""
    monkeypatch.setenv("REPLICA_RANK", "0")
    monkeypatch.setenv("REPLICA_WORLD_SIZE", "1")
    return lambda folder, **wanted: replica.train(folder, 0, wanted)


CASES = {
    "three epochs": {},
    "accumulation": {"arguments": {"gradient_accumulation_steps": 2}},
    "evaluation after every epoch": {"arguments": {"eval_strategy": "epoch"}},
    "evaluation, and the best model": {
        "arguments": {
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_strategy": "steps",
            "save_steps": 4,
            "load_best_model_at_end": True,
        }
    },
    "an own sampler": {"sampler": "own"},
    "a sampler that draws from torch's generator": {"sampler": "torch"},
    "an elastic run": {"connect": {"min_replicas": 1}},
}


NO_FSDP2 = pytest.mark.skipif(
    transformers.__version__.startswith("5.3."), reason="its trainer has FSDP2 on GPUs alone"
)


@functools.cache
def undisturbed(parent, case):
    return run(parent / case, **CASES[case])[1]


def check_same(end, expected):
    assert end["digest"] == expected["digest"]
    for counter in ("step", "inner_steps", "epoch"):
        assert end[counter] == expected[counter]
    logged = {entry["step"]: entry["loss"] for entry in expected["log"] if "loss" in entry}
    again = {entry["step"]: entry["loss"] for entry in end["log"] if "loss" in entry}
    assert again.items() <= logged.items()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", [2, 13, 16])
def test_a_killed_replica_ends_as_one_that_was_not(tmp_path, tmp_path_factory, case, step):
    expected = undisturbed(tmp_path_factory.getbasetemp(), case)
    run(tmp_path / "run", code=KILLED, signal=[step, "SIGKILL"], **CASES[case])
    check_same(run(tmp_path / "run", **CASES[case])[1], expected)


@pytest.mark.parametrize(
    ("step", "case"),
    [
        (8, {}),
        (12, CASES["evaluation, and the best model"]),  # at the end of an epoch
        pytest.param(13, {"sharded": True}, marks=NO_FSDP2),
    ],
    ids=["ddp", "the best model", "fsdp"],
)
def test_a_killed_replica_of_two_processes_ends_as_one_that_was_not(tmp_path, step, case):
    expected = run(tmp_path / "never", processes=2, **case)[1]
    run(tmp_path / "run", code=1, processes=2, signal=[step, "SIGKILL"], **case)
    check_same(run(tmp_path / "run", processes=2, **case)[1], expected)


@pytest.mark.parametrize("jit", [False, True], ids=["", "with a handler of the trainer's own"])
def test_sigterm_saves_and_leaves(tmp_path, tmp_path_factory, jit):
    expected = undisturbed(tmp_path_factory.getbasetemp(), "three epochs")
    case = {"arguments": {"enable_jit_checkpoint": jit}}
    output, _ = run(tmp_path / "run", code=TERMINATED, signal=[13, "SIGTERM"], **case)
    assert "told to end (SIGTERM) after inner step 14" in output
    output, end = run(tmp_path / "run", **case)
    assert "inner step 14" in output
    assert end["digest"] == expected["digest"]


def test_replicas_end_with_the_same_model(tmp_path):
    replicas = [start(tmp_path / "run", rank, 2) for rank in range(2)]
    for process in replicas:
        output, _ = process.communicate()
        assert process.returncode == 0, output
    ends = [json.loads((tmp_path / "run" / f"end-{rank}.json").read_text()) for rank in range(2)]
    assert ends[0]["digest"] == ends[1]["digest"]
    losses = [[entry["loss"] for entry in end["log"] if "loss" in entry] for end in ends]
    assert losses[0] != losses[1]


@pytest.mark.skipif(
    transformers.__version__.startswith("5.3."),
    reason="that version divides a loss by the micro-batches which is per token already",
)
def test_it_is_bit_equal_to_a_plain_loop(tmp_path, lone):
    # Without dropout: some versions of the trainer draw random numbers before the first step.
    wanted = {"dropout": 0.0, "arguments": {"gradient_accumulation_steps": 2}}
    end = lone(tmp_path / "a", **wanted)
    trainer = replica.make_trainer(tmp_path, 0, wanted, callbacks=[])
    batches = trainer.get_train_dataloader()
    model, steps = trainer.model, 3 * 6
    optimizer = trainer.create_optimizer()
    assert optimizer.defaults["fused"]
    schedule = trainer.create_scheduler(steps)
    model.train()
    with DiLoCo(model, optimizer, connect(tmp_path / "plain"), sync_every=3):
        for epoch in range(3):
            batches.set_epoch(epoch)
            rows = list(batches)
            for first in range(0, len(rows), 2):
                group = rows[first : first + 2]
                items = sum(row["labels"].ne(-100).sum() for row in group)
                for row in group:
                    model(**row, num_items_in_batch=items).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert replica.digest(model) == end["digest"]


def test_a_run_that_has_ended_is_not_trained_again(tmp_path, lone):
    first = lone(tmp_path)
    again = lone(tmp_path, connect={"resume": True})
    assert again["digest"] == first["digest"]
    assert again["step"] == first["step"]


@pytest.mark.skipif(
    transformers.__version__.startswith("5.3."),
    reason="that version divides the losses of one process by the steps of all",
)
def test_a_replica_that_is_back_tells_the_mean_loss_of_its_own_steps(tmp_path, lone):
    with pytest.raises(LookupError):
        lone(tmp_path, fails=20)
    log = lone(tmp_path)["log"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) < 33 - 18 + 1
    (mean,) = [entry["train_loss"] for entry in log if "train_loss" in entry]
    assert mean == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_a_step_that_a_scaler_skips_is_none_of_the_run(tmp_path, lone):
    expected = lone(tmp_path / "never", skips=4)
    assert (expected["step"], expected["inner_steps"]) == (33, 32)
    with pytest.raises(LookupError):
        lone(tmp_path / "run", skips=4, fails=14)
    check_same(lone(tmp_path / "run", skips=4), expected)


USED = {
    "_evaluate": "trial ignore_keys_for_eval skip_scheduler",
    "_load_rng_state": "checkpoint",
    "_maybe_log_save_evaluate": "tr_loss grad_norm model trial epoch ignore_keys_for_eval "
    "start_time",
    "_run_epoch": "model epoch train_dataloader num_update_steps_per_epoch trial "
    "ignore_keys_for_eval start_time resume_from_checkpoint epochs_trained "
    "steps_trained_in_current_epoch",
}


@pytest.mark.parametrize("name", USED)
def test_what_is_private_in_a_trainer_takes_what_the_callback_knows(name):
    """Where this fails, a newer version has changed what the callback relies on."""
    taken = list(inspect.signature(getattr(Trainer, name)).parameters)
    if name == "_run_epoch":  # called by names
        assert set(USED[name].split()) <= set(taken)
    else:
        assert taken[1:][: len(USED[name].split())] == USED[name].split()


def test_what_is_private_in_a_trainer_is_set_when_the_callback_is_called(tmp_path):
    names = {"_tr_loss", "_globalstep_last_logged", "callback_handler", "lr_scheduler"}
    if not transformers.__version__.startswith("5.3."):
        names.add("_initial_global_step")

    class Looks(TrainerCallback):
        def on_train_begin(self, *_, **__):
            assert names <= vars(trainer).keys()

    trainer = replica.make_trainer(
        tmp_path, 0, {"arguments": {"max_steps": 1}}, callbacks=[Looks()]
    )
    trainer.train()


def test_a_stream_is_read_again(tmp_path, lone, caplog):
    wanted = {"stream": True, "arguments": {"max_steps": 10}}
    expected = lone(tmp_path / "never", **wanted)
    with pytest.raises(LookupError):
        lone(tmp_path / "run", fails=8, **wanted)
    with caplog.at_level(logging.INFO):
        assert lone(tmp_path / "run", **wanted)["digest"] == expected["digest"]
    assert "6 batches are read again" in caplog.text
    again = lone(tmp_path / "run", connect={"resume": True}, **wanted)
    assert (again["digest"], again["step"]) == (expected["digest"], 10)


def test_a_stream_that_ends_early_is_begun_anew(tmp_path, lone):
    """One pass over it has 11 batches."""
    wanted = {"stream": True, "arguments": {"max_steps": 16}}
    with pytest.raises(LookupError):
        lone(tmp_path / "run", fails=14, **wanted)
    end = lone(tmp_path / "run", **wanted)
    assert (end["step"], end["inner_steps"]) == (16, 16)


@pytest.mark.parametrize(
    ("step", "every", "killed", "named"), [(6, 3, 11, "by its folder"), (23, 9, 24, "as the last")]
)
def test_the_store_counts_more_than_a_checkpoint_of_the_trainer(
    tmp_path, step, every, killed, named
):
    """The second one is newer than what the store holds, and of a later epoch."""
    wanted = {
        "diloco": {"sync_every": every},
        "arguments": {"save_strategy": "steps", "save_steps": step},
    }
    expected = run(tmp_path / "never", **wanted)[1]
    run(tmp_path / "run", code=KILLED, signal=[killed, "SIGKILL"], **wanted)
    folder = str(tmp_path / "run" / "out-0" / f"checkpoint-{step}")
    checkpoint = folder if named == "by its folder" else True
    output, end = run(tmp_path / "run", checkpoint=checkpoint, **wanted)
    assert end["digest"] == expected["digest"]
    assert f"of step {step}, and the run's store holds step {killed // every * every}" in output


def test_a_new_run_goes_on_from_a_checkpoint_of_the_trainer(tmp_path, lone):
    lone(tmp_path / "first", arguments={"save_strategy": "steps", "save_steps": 8})
    checkpoint = str(tmp_path / "first" / "out-0" / "checkpoint-8")
    end = lone(tmp_path / "second", checkpoint=checkpoint)
    assert (end["step"], end["inner_steps"]) == (33, 33 - 8)


def test_metrics_go_both_ways(tmp_path, lone):
    end = lone(tmp_path)
    (key,) = (tmp_path / "run" / "live").iterdir()
    metrics = json.loads(key.read_text())["metrics"]
    assert {"loss", "learning_rate", "grad_norm"} <= metrics.keys()
    assert not any(name.startswith("diloco") for name in metrics)
    syncs = [entry["diloco_sync"] for entry in end["log"] if "diloco_sync" in entry]
    assert syncs == list(range(1, 12))
    assert sum("loss" in entry for entry in end["log"]) == 33


def test_an_error_ends_the_other_replica_too(tmp_path):
    soon = {"return_within": 0.0}
    failing = start(tmp_path / "run", 0, 2, fails=5, connect=soon)
    replicas = [failing, start(tmp_path / "run", 1, 2, connect=soon)]
    outputs = [replica.communicate()[0] for replica in replicas]
    assert [replica.returncode for replica in replicas] == [1, 1]
    assert "LookupError: the trainer has failed" in outputs[0]
    assert "rank 0" in outputs[1]
    assert "LookupError: the trainer has failed" in outputs[1]


class Broken(TrainerCallback):
    def fail(self, *_, **__):
        raise LookupError("a callback has failed")


@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_evaluate"])
def test_an_error_outside_of_the_epochs_leaves_the_block(tmp_path, event):
    callback = DiLoCoCallback(connect(tmp_path / "run", rank=0, world_size=1), sync_every=3)
    broken = Broken()
    setattr(broken, event, broken.fail)
    wanted = {"arguments": {"eval_on_start": True}}
    trainer = replica.make_trainer(tmp_path, 0, wanted, callbacks=[callback, broken])
    with pytest.raises(LookupError):
        trainer.train()
    with pytest.raises(SyncError, match="inside the block"):
        callback.outer.log(loss=1.0)
    assert not {"_run_epoch", "_evaluate"} & vars(trainer).keys()
    assert getattr(broken, event) == broken.fail
    with pytest.raises(ConfigurationError, match="make a new one for each call"):
        trainer.train()


def test_the_last_sync_before_an_early_stop_is_logged(tmp_path):
    callback = DiLoCoCallback(connect(tmp_path / "run", rank=0, world_size=1), sync_every=3)

    class Stops(TrainerCallback):
        def on_evaluate(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 4

    wanted = {"arguments": {"eval_strategy": "steps", "eval_steps": 2}}
    trainer = replica.make_trainer(tmp_path, 0, wanted, callbacks=[callback, Stops()])
    trainer.train()
    history = trainer.state.log_history
    assert [entry["diloco_sync"] for entry in history if "diloco_sync" in entry] == [1, 2]
    assert callback.outer.inner_steps == 4


def refuse(tmp_path, match, callbacks, **wanted):
    trainer = replica.make_trainer(tmp_path, 0, wanted, callbacks=callbacks)
    with pytest.raises(ConfigurationError, match=match):
        trainer.train()
    assert not list((tmp_path / "run").iterdir())


def test_mistakes_are_refused(tmp_path):
    exchange = functools.partial(connect, tmp_path / "run", rank=0, world_size=1)
    two = [DiLoCoCallback(exchange(), sync_every=3), DiLoCoCallback(exchange(), sync_every=3)]
    refuse(tmp_path, "two DiLoCoCallbacks", two)
    taken = DiLoCoCallback(exchange(), sync_every=3, stateful={"scaler": torch.nn.Linear(1, 1)})
    refuse(tmp_path, "stateful of DiLoCoCallback has scaler", [taken])
    searching = {"arguments": {"auto_find_batch_size": True}}
    one = DiLoCoCallback(exchange(), sync_every=3)
    refuse(tmp_path, "not work with auto_find_batch_size", [one], **searching)
    with pytest.raises(ConfigurationError, match=r"no option outer_rate: .*outer_lr, "):
        DiLoCoCallback(exchange(), sync_every=3, outer_rate=0.7)


class AddsLate(TrainerCallback):
    def __init__(self, trainer, late):
        self.trainer, self.late = trainer, late

    def on_epoch_begin(self, args, state, control, **_):
        if self.late not in self.trainer.callback_handler.callbacks:
            self.trainer.add_callback(self.late)


def test_a_callback_that_is_added_late_is_refused(tmp_path):
    late = DiLoCoCallback(connect(tmp_path / "run", rank=0, world_size=1), sync_every=3)
    trainer = replica.make_trainer(tmp_path, 0, {}, callbacks=[])
    trainer.add_callback(AddsLate(trainer, late))
    with pytest.raises(ConfigurationError, match="added after the training began"):
        trainer.train()


def test_a_second_training_is_refused(tmp_path):
    callback = DiLoCoCallback(connect(tmp_path / "run", rank=0, world_size=1), sync_every=3)
    trainer = replica.make_trainer(tmp_path, 0, {}, callbacks=[callback])
    trainer.train()
    with pytest.raises(ConfigurationError, match="make a new one for each call"):
        trainer.train()


def test_few_steps_are_named_at_once(tmp_path, lone, caplog):
    with caplog.at_level(logging.WARNING):
        lone(tmp_path, arguments={"max_steps": 2})
    assert "the training has 2 steps, and sync_every is 3" in caplog.text


@pytest.mark.parametrize("kind", ["groups of four", "groups of six"])
def test_an_interval_that_parts_generations_is_refused(tmp_path, kind):
    steps = {"groups of four": 4, "groups of six": 6}[kind]
    callback = DiLoCoCallback(connect(tmp_path / "run", rank=0, world_size=1), sync_every=9)
    trainer = replica.make_trainer(tmp_path, 0, {}, callbacks=[callback])
    trainer.args.steps_per_generation = steps  # as GRPOConfig has it
    nearest = {4: 8, 6: 12}[steps]
    with pytest.raises(ConfigurationError, match=f"choose a multiple of that, such as {nearest}"):
        trainer.train()
