"""One replica of a run under a ``Trainer``, as a process: ``replica.py FOLDER JSON``.

It trains a tiny GPT-2 that is made from its configuration, and writes what it ended with into
``FOLDER/end-RANK.json``.
"""

import gc
import hashlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from diloco_core import connect
from diloco_core.transformers import DiLoCoCallback

VOCABULARY, LENGTH, EXAMPLES = 64, 16, 22


class Examples(torch.utils.data.Dataset):
    """Sequences that differ between ranks; some labels are left out, so batches weigh unequally."""

    def __init__(self, rank):
        drawing = torch.Generator().manual_seed(rank)
        self.rows = torch.randint(VOCABULARY, (EXAMPLES, LENGTH), generator=drawing)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        labels = self.rows[number].clone()
        labels[: number % 5] = -100
        return {"input_ids": self.rows[number], "labels": labels}


class Stream(torch.utils.data.IterableDataset):
    """The same without a length."""

    def __init__(self, rank):
        self.examples = Examples(rank)

    def __iter__(self):
        return map(self.examples.__getitem__, range(EXAMPLES))


class Signalled(TrainerCallback):
    """Sends a signal to this process after some step."""

    def __init__(self, step, name):
        self.step, self.signal = step, getattr(signal, name)

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.signal)


class Fails(TrainerCallback):
    """Raises an error after some step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise LookupError("the trainer has failed")


class Skips(TrainerCallback):
    """Leaves out a step of the optimizer and of its schedule, as a gradient scaler does."""

    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
        if state.global_step == self.step:
            optimizer.step, optimizer._is_overflow = lambda: None, True

    def on_step_end(self, args, state, control, optimizer, **_):
        vars(optimizer).pop("step", None)
        optimizer._is_overflow = False


def make_model(dropout=0.1):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    return GPT2LMHeadModel(config)


def make_sharded_model(folder):
    """The same, of which each process of the replica holds a part (FSDP2)."""
    from transformers.distributed import DistributedConfig

    if torch.distributed.get_rank() == 0:
        make_model().save_pretrained(folder / "model")
    torch.distributed.barrier()
    shared_by_two = DistributedConfig(fsdp_size=2)
    return GPT2LMHeadModel.from_pretrained(folder / "model", distributed_config=shared_by_two)


def digest(model):
    wholes = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    parts = [whole.detach().contiguous().numpy().tobytes() for whole in wholes]
    return hashlib.sha256(b"".join(parts)).hexdigest()


class InOrderOfAGenerator(torch.utils.data.Sampler):
    """Draws the order of each epoch after that of the one before; Accelerate replaces torch's."""

    def __init__(self, length):
        self.length, self.generator = length, torch.Generator().manual_seed(7)

    def __len__(self):
        return self.length

    def __iter__(self):
        yield from torch.randperm(self.length, generator=self.generator).tolist()


class Sampled(Trainer):
    """Takes its examples in the order of a sampler of its own."""

    def _get_train_sampler(self, *_):
        return InOrderOfAGenerator(len(self.train_dataset))


class SampledByTorch(Trainer):
    """Takes its examples in an order that torch's generator draws, as one by length does."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.WeightedRandomSampler([1.0] * EXAMPLES, EXAMPLES)


TRAINERS = {None: Trainer, "own": Sampled, "torch": SampledByTorch}


def make_trainer(folder, rank, wanted, callbacks):
    set_seed(1)
    arguments = TrainingArguments(
        output_dir=str(folder / f"out-{rank}"),
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        seed=5,
        **{"num_train_epochs": 3, "save_strategy": "no", **wanted.get("arguments", {})},
    )
    data = Examples(rank)
    sharded = wanted.get("sharded")
    return TRAINERS[wanted.get("sampler")](
        make_sharded_model(folder) if sharded else make_model(wanted.get("dropout", 0.1)),
        arguments,
        train_dataset=Stream(rank) if wanted.get("stream") else data,
        eval_dataset=data,
        callbacks=callbacks,
    )


def train(folder, rank, wanted):
    exchange = connect(folder / "run", **wanted.get("connect", {}))
    options = {"sync_every": 3, "save_inner_every": 1, **wanted.get("diloco", {})}
    callback = DiLoCoCallback(exchange, **options)
    signals = [Signalled(*wanted["signal"])] if "signal" in wanted else []
    failing = [Fails(wanted["fails"])] if "fails" in wanted else []
    skipping = [Skips(wanted["skips"])] if "skips" in wanted else []
    trainer = make_trainer(folder, rank, wanted, [callback, *signals, *failing, *skipping])
    trainer.train(resume_from_checkpoint=wanted.get("checkpoint"))
    return {
        "digest": digest(trainer.model),
        "step": trainer.state.global_step,
        "inner_steps": callback.outer.inner_steps,
        "epoch": trainer.state.epoch,
        "log": trainer.state.log_history,
    }


def main():
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    torch.set_num_threads(1)
    folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = int(os.environ["REPLICA_RANK"])
    end = train(folder, rank, wanted)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # its processes end with the same
        (folder / f"end-{rank}.json").write_text(json.dumps(end))
    if torch.distributed.is_initialized():  # the trainer leaves that to its program
        torch.distributed.destroy_process_group()
        gc.collect()  # the trainer's model in DDP keeps gloo's threads, which may abort at the end


if __name__ == "__main__":
    main()
