"""TRL's trainers, with a model that is made from its configuration."""

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_words import make_model, make_tokenizer
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from diloco_core import ConfigurationError, connect, export
from diloco_core.transformers import DiLoCoCallback

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # TRL's and PEFT's
]

COMMON = {
    "per_device_train_batch_size": 2,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
}


def make_callback(folder, sync_every, **options):
    set_seed(1)
    exchange = connect(folder / "run", rank=0, world_size=1, **options)
    return DiLoCoCallback(exchange, sync_every=sync_every, save_inner_every=1)


def make_sft(folder, callback, **more):
    return SFTTrainer(
        make_model(),
        SFTConfig(output_dir=str(folder / "out"), max_steps=6, max_length=16, **COMMON),
        train_dataset=Dataset.from_dict({"text": ["a b c d e f", "g h i j"] * 8}),
        processing_class=make_tokenizer(),
        callbacks=[callback],
        **more,
    )


def make_grpo(folder, callback, **arguments):
    def reward(completions, **_):
        return [float(completion.count("a")) for completion in completions]

    given = {"max_steps": 6, "num_generations": 2, "max_completion_length": 6, **arguments}
    return GRPOTrainer(
        make_model(),
        reward,
        GRPOConfig(output_dir=str(folder / "out"), **given, **COMMON),
        train_dataset=Dataset.from_dict({"prompt": ["a b c", "d e f", "g h"] * 4}),
        processing_class=make_tokenizer(),
        callbacks=[callback],
    )


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("make", [make_sft, make_grpo])
def test_a_replica_comes_back(tmp_path, make):
    trainer = make(tmp_path / "never", make_callback(tmp_path / "never", 2))
    trainer.train()
    expected = values(trainer.model)

    class Stopped(DiLoCoCallback):
        def on_step_end(self, args, state, control, **given):
            super().on_step_end(args, state, control, **given)
            if state.global_step == 3:
                raise KeyboardInterrupt

    set_seed(1)
    exchange = connect(tmp_path / "stopped" / "run", rank=0, world_size=1)
    stopped = make(tmp_path / "stopped", Stopped(exchange, sync_every=2, save_inner_every=1))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    callback = make_callback(tmp_path / "stopped", 2)
    again = make(tmp_path / "stopped", callback)
    again.train()
    assert callback.outer.committed == 3
    assert all(map(torch.equal, values(again.model), expected))


def test_an_interval_that_parts_generations_is_refused(tmp_path):
    callback = make_callback(tmp_path, 3)
    trainer = make_grpo(
        tmp_path, callback, gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2
    )
    with pytest.raises(ConfigurationError, match="such as 4"):
        trainer.train()


def test_an_adapter_is_sent_alone_and_loaded_by_peft(tmp_path):
    callback = make_callback(tmp_path, 2)
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make_sft(tmp_path, callback, peft_config=adapter)
    trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    sent = [
        each["diloco_bytes_sent"] for each in trainer.state.log_history if "diloco_sync" in each
    ]
    assert all(bytes_sent < 3 * 4 * trained + 8192 for bytes_sent in sent)
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(make_model(), str(tmp_path / "adapter"))
    ours = {name: p for name, p in trainer.model.named_parameters() if "lora" in name}
    theirs = dict(loaded.named_parameters())
    assert ours
    assert all(torch.equal(p, theirs[name]) for name, p in ours.items())
    export(tmp_path / "run", tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(p, exported[name]) for name, p in ours.items())
    # The page's way from the store to an adapter, without the trainer.
    model = get_peft_model(make_model(), adapter)
    assert not model.load_state_dict(exported, strict=False).unexpected_keys
    model.save_pretrained(tmp_path / "exported")
    loaded = dict(PeftModel.from_pretrained(make_model(), tmp_path / "exported").named_parameters())
    assert all(torch.equal(p, loaded[name]) for name, p in ours.items())
