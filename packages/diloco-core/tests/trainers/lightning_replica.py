"""The trainer of ``with_lightning.py``, which kills itself after the step KILLED_AFTER.

With BY_EPOCHS it ends after two of them, and accumulates gradients.
"""

import os
import signal

import lightning
import with_lightning


class Killed(with_lightning.DiLoCoCallback):
    def on_train_batch_end(self, trainer, *given):
        super().on_train_batch_end(trainer, *given)
        if os.environ.get("KILLED_AFTER") == str(trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)


class ByEpochs(lightning.Trainer):
    def __init__(self, **given):
        super().__init__(**{**given, "max_steps": -1}, max_epochs=2, accumulate_grad_batches=2)


if "BY_EPOCHS" in os.environ:
    with_lightning.lightning.Trainer = ByEpochs
with_lightning.DiLoCoCallback = Killed
train = with_lightning.train
