"""TRL's ``GRPOTrainer``: ``sync_every`` is a multiple of the steps that share a generation."""

import tiny
from datasets import Dataset
from tiny_words import make_model, make_tokenizer
from trl import GRPOConfig, GRPOTrainer

from diloco_core import connect
from diloco_core.transformers import DiLoCoCallback


def reward(completions, **_):
    """More for every ``a`` in the text."""
    return [float(completion.count("a")) for completion in completions]


def train(steps):
    """Train one replica; returns its steps."""
    exchange = connect()
    callback = DiLoCoCallback(exchange, sync_every=10)
    prompts = ["a b c", "d e f", "g h", "i j k"] * 20
    trainer = GRPOTrainer(
        make_model(),
        reward,
        GRPOConfig(
            "not-used",
            max_steps=steps,
            num_generations=2,
            max_completion_length=6,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}).shard(
            exchange.world_size, exchange.rank
        ),
        processing_class=make_tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    return [callback.outer.inner_steps]


if __name__ == "__main__":
    tiny.main(__file__)
