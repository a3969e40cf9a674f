"""The losses of the proof, with a model and a text that take no time."""

from dataclasses import replace

import pytest
import torch


@pytest.fixture(scope="module")
def tiny(proof):
    return proof.losses.Training(
        replicas=2, steps=8, sync_every=4, batch=2, context=8, width=32, layers=1, lr=1e-2,
        validation=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def text(proof):
    """Texts that can be learned: in each, a byte says which one comes next."""
    counting = torch.arange(4000, dtype=torch.int64)
    parts = tuple((counting * step % 64).to(torch.uint8) for step in (1, 3))
    return proof.text.Text(parts, torch.cat(parts), "counting")


def row_of(proof, name):
    return next(row for row in proof.rows.ROWS if row.name == name)


class TestLossOf:
    def test_the_seed_decides_the_loss(self, proof, text, tiny):
        row = row_of(proof, "delay-e2m1")
        loss = proof.losses.loss_of(row, 0, text, tiny)
        assert proof.losses.loss_of(row, 0, text, tiny) == loss
        assert proof.losses.loss_of(row, 1, text, tiny) != loss
        assert loss < proof.losses.loss_of(row, 0, text, replace(tiny, lr=0.0)), "it has learned"

    @pytest.mark.slow
    def test_every_row_trains_in_a_way_of_its_own(self, proof, text, tiny):
        losses = {row.name: proof.losses.loss_of(row, 0, text, tiny) for row in proof.rows.ROWS}
        assert len(set(losses.values())) == len(losses), losses

    def test_synchronous_training_is_the_limit_of_averaging_at_every_step(self, proof, text, tiny):
        """With one step between syncs, outer SGD with lr 1, and SGD as the inner optimizer."""
        with pytest.MonkeyPatch.context() as patch:
            sgd = torch.optim.SGD
            patch.setattr(proof.losses, "_optimizer", lambda model: sgd(model.parameters()))
            outer = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
            patch.setattr(proof.rows.Row, "options", lambda *_: outer)
            each = proof.losses.loss_of(row_of(proof, "plain"), 0, text, tiny)
            together = proof.losses.loss_of(row_of(proof, "synchronous"), 0, text, tiny)
        assert each == pytest.approx(together, rel=1e-5)


class TestMeasureLosses:
    def test_a_run_that_was_stopped_goes_on_where_it_was(
        self, proof, text, tiny, tmp_path, monkeypatch
    ):
        trained = []

        def loss_of(row, seed, *_):
            trained.append((row.name, seed))
            if len(trained) == 3:
                raise KeyboardInterrupt
            return 2.0 + seed

        command = proof.command
        monkeypatch.setattr(command, "loss_of", loss_of)
        monkeypatch.setattr(command, "standard_library", lambda *_: text)
        rows = proof.rows.ROWS[:2]
        with pytest.raises(KeyboardInterrupt):
            command.measure_losses(rows, tmp_path, tiny)
        command.measure_losses(rows, tmp_path, tiny)
        first, second = (row.name for row in rows)
        assert trained == [
            (first, 0), (second, 0), (first, 1), (first, 1), (second, 1), (first, 2), (second, 2),
        ]  # fmt: skip
        kept = proof.results.Results.of(tmp_path / "losses.json")
        assert kept.found == {name: {"0": 2.0, "1": 3.0, "2": 4.0} for name in (first, second)}
        with pytest.raises(SystemExit, match=r"another setup \(training differ\)"):
            command.measure_losses(rows, tmp_path, replace(tiny, steps=9))


@pytest.mark.slow
class TestStandardLibrary:
    def test_replicas_have_texts_of_their_own_and_none_has_the_validation(self, proof):
        text = proof.text.standard_library(4)
        assert len({bytes(part.numpy()) for part in text.parts}) == 4
        held_out = bytes(text.validation[:10_000].numpy())
        assert all(held_out not in bytes(part.numpy()) for part in text.parts)
        assert text.size > 1e6
        short = proof.text.standard_library(4, 1000)
        assert (short.size, len(short.validation)) == (4000, 1000)
        assert short.digest != text.digest == proof.text.standard_library(4).digest
