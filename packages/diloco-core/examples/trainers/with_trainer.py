"""Hugging Face's ``Trainer``: the callback is all that is new (docs/trainers.md)."""

import tiny
from transformers import Trainer, TrainingArguments

from diloco_core import connect
from diloco_core.transformers import DiLoCoCallback


def train(steps):
    """Train one replica; returns its steps, and the last loss."""
    exchange = connect()
    callback = DiLoCoCallback(exchange, sync_every=10)
    arguments = TrainingArguments(
        "not-used",
        max_steps=steps,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        tiny.make_model(),
        arguments,
        train_dataset=tiny.Text(exchange.rank, exchange.world_size),
        callbacks=[callback],
    )
    result = trainer.train()
    return [callback.outer.inner_steps, round(result.training_loss, 3)]


if __name__ == "__main__":
    tiny.main(__file__)
