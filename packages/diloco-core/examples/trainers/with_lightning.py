"""Lightning's ``Trainer``: a callback, and a sampler that passes over what the run has seen.

A replica that comes back goes on from the run's store alone, in the middle of an epoch too. What
Lightning does after a step, such as a validation, is not repeated for the step at which it is back.
"""

import itertools
import math
import signal

import lightning
import tiny
import torch
from torch.utils.data import DataLoader, DistributedSampler

from diloco_core import DiLoCo, connect


class Sampler(DistributedSampler):
    """This replica's part of the data, in an order of its own for every epoch."""

    skip = 0  # examples of the next epoch

    def __iter__(self):
        skip, self.skip = self.skip, 0
        return itertools.islice(super().__iter__(), skip, None)


class DiLoCoCallback(lightning.Callback):
    """Trains the model of a Lightning ``Trainer`` as one replica of a run."""

    def __init__(self, exchange, **options):
        self.exchange, self.options = exchange, options
        self.is_open = False

    def on_train_start(self, trainer, module):
        schedules = {
            f"schedule{number}": config.scheduler
            for number, config in enumerate(trainer.lr_scheduler_configs)
        }
        # Lightning's own handler would only end the training; the outer loop's saves first.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (optimizer,) = trainer.optimizers
        options = {"stateful": schedules, **self.options}
        self.outer = DiLoCo(module, optimizer, self.exchange, **options)
        self.outer.__enter__()
        self.is_open = True
        steps = self.outer.inner_steps  # 0 unless this replica, or its run, has lived before
        # The last step of an epoch may take fewer batches.
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        epoch, in_epoch = divmod(steps, per_epoch)
        in_epoch *= trainer.accumulate_grad_batches
        for config in trainer.lr_scheduler_configs:  # saved inside the last step, before they moved
            moves = steps if config.interval == "step" else epoch
            while config.scheduler.last_epoch < moves // config.frequency:
                config.scheduler.step()
        loop = trainer.fit_loop
        loop.epoch_progress.current.processed = loop.epoch_progress.current.completed = epoch
        loop.epoch_loop.batch_progress.current.completed = in_epoch
        loop.epoch_loop.restarting = bool(in_epoch)
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = steps
        loader = trainer.train_dataloader
        loader.sampler.skip = in_epoch * loader.batch_size

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        last = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if last or trainer.global_step == trainer.max_steps:
            self.leave()

    def on_train_end(self, trainer, module):  # where another callback has ended the training
        self.leave()

    def on_exception(self, trainer, module, exception):
        self.leave(type(exception), exception, exception.__traceback__)

    def leave(self, *error):
        if self.is_open:
            self.is_open = False
            self.outer.__exit__(*error or (None, None, None))


class Model(lightning.LightningModule):
    """An ordinary module of Lightning's."""

    def __init__(self):
        super().__init__()
        self.model = tiny.make_model()

    def training_step(self, batch):
        return self.model(**batch).loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(steps):
    """Train one replica; returns its steps."""
    exchange = connect()
    data = tiny.Text(0, 1)
    sampler = Sampler(data, exchange.world_size, exchange.rank)
    callback = DiLoCoCallback(exchange, sync_every=10, save_inner_every=1)
    trainer = lightning.Trainer(
        max_steps=steps,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=8, sampler=sampler))
    return callback.outer.inner_steps


if __name__ == "__main__":
    tiny.main(__file__)
