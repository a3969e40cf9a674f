"""TRL's ``SFTTrainer`` with LoRA: the replicas send the adapter alone, which PEFT loads again."""

import tiny
from datasets import Dataset
from peft import LoraConfig
from tiny_words import make_model, make_tokenizer
from trl import SFTConfig, SFTTrainer

from diloco_core import connect
from diloco_core.transformers import DiLoCoCallback


def train(steps):
    """Train one replica; returns its steps, and the mean loss."""
    exchange = connect()
    callback = DiLoCoCallback(exchange, sync_every=10)
    texts = ["a b c d e f", "g h i j", "k l m n o p"] * 20
    trainer = SFTTrainer(
        make_model(),
        SFTConfig(
            "not-used",
            max_steps=steps,
            max_length=16,
            learning_rate=1e-2,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"text": texts}).shard(exchange.world_size, exchange.rank),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[callback],
    )
    result = trainer.train()
    return [callback.outer.inner_steps, round(result.training_loss, 3)]


if __name__ == "__main__":
    tiny.main(__file__)
