"""How runs end: partial periods, replicas that have taken fewer steps than others, and models that
all end the same.
"""

import keys_lab
import pytest
import torch
from torch import nn

from diloco_core import (
    DiLoCo,
    Elastic,
    StoreExchange,
    UnequalSyncsError,
    in_process,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas


def make_model(lab):
    return lab.fill(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))


def exchanges(tmp_path, kind, count):
    if kind == "threads":
        return in_process(count)
    return [StoreExchange(open_store(str(tmp_path / "run")), rank, count) for rank in range(count)]


def skipping(lab, skipped, steps, **options):
    """Training in which rank r skips the first ``skipped[r]`` steps of ``steps``, as its gradient
    scaler would.
    """

    def replica(exchange):
        model = make_model(lab)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, **options) as outer:
            for step in range(skipped[exchange.rank], steps):
                lab.push(model, inner, exchange.rank, step)
        copies = [copy.clone() for part in outer.state_dict()["fragments"] for copy in part["copy"]]
        held = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert torch.equal(held, torch.cat(copies)), "the model is the last committed state"
        return lab.values(model), outer.committed

    return replica


class TestSkippedSteps:
    @pytest.mark.parametrize("kind", ["threads", "store"])
    @pytest.mark.parametrize("skipped", [(0, 1), (1, 0), (0, 2, 1), (3, 0, 0)])
    @pytest.mark.parametrize("steps", [8, 9, 11])
    def test_all_end_the_same(self, lab, tmp_path, caplog, kind, skipped, steps):
        """The flush of one meets a regular sync of another; what nobody is left for is dropped,
        with a warning.
        """
        runs = lab.run(
            skipping(lab, skipped, steps, sync_every=4), exchanges(tmp_path, kind, len(skipped))
        )
        assert lab.identical([held for held, _ in runs])
        fewest = min(-(-(steps - one) // 4) for one in skipped)
        assert [committed for _, committed in runs] == [fewest] * len(skipped)
        for rank, one in enumerate(skipped):
            dropped = -(-(steps - one) // 4) > fewest
            assert (f"rank {rank}: rank" in caplog.text) == dropped
        if "dropped" in caplog.text:
            assert f"has left the run after {fewest} syncs, so this replica" in caplog.text
            assert f"cannot take sync {fewest + 1}, which needs all replicas" in caplog.text
            assert f"the values of outer step {fewest}" in caplog.text

    @pytest.mark.parametrize("kind", ["threads", "store"])
    @pytest.mark.parametrize("steps", [4, 5, 6, 7])
    def test_with_fragments(self, lab, tmp_path, kind, steps):
        runs = lab.run(
            skipping(lab, (0, 1, 0), steps, sync_every=4, fragments=2), exchanges(tmp_path, kind, 3)
        )
        assert lab.identical([held for held, _ in runs])

    def test_nothing_stays_behind_in_the_store(self, lab, tmp_path):
        lab.run(skipping(lab, (0, 1), 9, sync_every=4), exchanges(tmp_path, "store", 2))
        folder = tmp_path / "run"
        syncs = sorted(path.name.partition(".")[0] for path in (folder / "commits").iterdir())
        assert not [
            path
            for path in (folder / "deltas").rglob("*.safetensors")
            if f"{path.parent.name}" not in syncs
        ]
        is_note = keys_lab.of("note")
        notes = [
            path.read_text()
            for path in (folder / "deltas").rglob("*")
            if is_note(path.relative_to(folder).as_posix())
        ]
        assert len(notes) == 2
        assert all('"left"' in note for note in notes)

    @pytest.mark.parametrize("kind", ["threads", "store"])
    @pytest.mark.parametrize("flush", ["partial", "none"])
    @pytest.mark.parametrize("fragments", [1, 2])
    @pytest.mark.parametrize("skipped", [(0, 4), (4, 0, 2), (0, 1)])
    def test_one_that_lacks_the_last_sync_ends_the_run_for_all(
        self, lab, tmp_path, caplog, kind, flush, fragments, skipped
    ):
        """It has nothing to flush, or drops it: the last regular syncs of the others have nobody to
        meet.
        """
        steps, options = 8, {"sync_every": 4, "fragments": fragments, "flush": flush}
        runs = lab.run(
            skipping(lab, skipped, steps, **options), exchanges(tmp_path, kind, len(skipped))
        )
        assert lab.identical([held for held, _ in runs])
        (committed,) = {committed for _, committed in runs}
        whole, rest = divmod((steps - max(skipped)) * fragments, 4)
        if flush == "none":
            assert committed == whole
            assert "of this replica are not in the model: like all others, it ends" in caplog.text
        elif fragments == 1:
            assert committed == whole + bool(rest)

    @pytest.mark.parametrize("kind", ["threads", "store"])
    @pytest.mark.parametrize("flush", ["partial", "none"])
    def test_whoever_goes_on_training_stops_with_an_error(self, lab, tmp_path, kind, flush):
        """One that has left a whole period earlier is missed where the others go on training."""
        results = run_replicas(
            skipping(lab, (0, 8), 12, sync_every=4, flush=flush), exchanges(tmp_path, kind, 2)
        )
        assert isinstance(results[0], UnequalSyncsError)
        assert results[0].rank == 1
        assert (
            "rank 1 has left the run after 1 sync, so this replica (rank 0) cannot take sync 2"
            in str(results[0])
        )
        assert "This replica is still training" in str(results[0])
        assert "until `outer.committed` has the same value" in str(results[0])

    def test_its_error_cannot_be_passed_over(self, lab):
        def replica(exchange):
            model = make_model(lab)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(model, inner, exchange, sync_every=1) as outer:
                lab.push(model, inner, exchange.rank, 0)
                if exchange.rank == 0:
                    lab.push(model, inner, 0, 1)
                    held = lab.values(model)
                    for _ in range(2):
                        with pytest.raises(UnequalSyncsError):
                            lab.push(model, inner, 0, 2)
                    assert lab.identical([held, lab.values(model)])
                    assert outer.inner_steps == 2

        first, second = run_replicas(replica, in_process(2))
        assert second is None
        assert "an earlier sync of this outer loop has failed" in str(first)

    @pytest.mark.parametrize("kind", ["threads", "store"])
    def test_nothing_is_dropped_where_all_count_outer_steps(self, lab, tmp_path, caplog, kind):
        def replica(exchange):
            model, step = make_model(lab), 0
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(model, inner, exchange, sync_every=2) as outer:
                while outer.committed < 3:
                    if (step + exchange.rank) % 3:  # the others are skipped
                        lab.push(model, inner, exchange.rank, step)
                    step += 1
            return lab.values(model)

        assert lab.identical(lab.run(replica, exchanges(tmp_path, kind, 2)))
        assert "dropped" not in caplog.text

    def test_a_failure_is_still_a_failure(self, lab):
        def replica(exchange):
            if exchange.rank == 0:
                return skipping(lab, (0, 0), 3, sync_every=2)(exchange)
            model = make_model(lab)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCo(model, inner, exchange, sync_every=2):
                lab.push(model, inner, 1, 0)
                lab.push(model, inner, 1, 1)
                raise KeyError("lost")

        first, _ = run_replicas(replica, in_process(2))
        assert "rank 1 failed" in str(first)


class TestWithoutAFlush:
    @pytest.mark.parametrize("kind", ["threads", "store"])
    @pytest.mark.parametrize("fragments", [1, 2])
    @pytest.mark.parametrize("steps", [0, 3, 4, 7])
    def test_the_tail_is_dropped_and_all_end_the_same(self, lab, tmp_path, kind, fragments, steps):
        options = {"sync_every": 4, "fragments": fragments, "flush": "none"}
        runs = lab.run(skipping(lab, (0, 0, 0), steps, **options), exchanges(tmp_path, kind, 3))
        assert lab.identical([held for held, _ in runs])
        assert [committed for _, committed in runs] == [steps * fragments // 4] * 3
        if steps in {0, 3} and fragments == 1:
            assert lab.identical([runs[0][0], lab.values(make_model(lab))]), "the initial values"

    def test_whole_periods_are_as_with_one(self, lab):
        runs = [
            lab.run(skipping(lab, (0, 0), 8, sync_every=4, flush=flush), in_process(2))
            for flush in ("partial", "none")
        ]
        assert lab.identical([held for run in runs for held, _ in run])

    def test_a_flush_by_hand_is_a_flush(self, lab):
        model = make_model(lab)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, in_process(1)[0], sync_every=4, flush="none") as outer:
            lab.push(model, inner, 0, 0)
            assert len(outer.flush()) == 1
        assert outer.committed == 1

    @pytest.mark.parametrize("topology", ["sharded", "gather"])
    def test_in_elastic_runs_too(self, lab, tmp_path, topology):
        def incarnation(steps):
            exchange = StoreExchange(
                open_store(str(tmp_path)), 0, 1, Elastic(1, grace=1.0, topology=topology)
            )
            return skipping(lab, (0,), steps, sync_every=2, flush="none")(exchange)

        held, committed = incarnation(5)
        assert committed == 2
        again, committed = incarnation(1)
        assert committed == 2
        assert lab.identical([held, again]), "what was dropped was never in the run"

    def test_replicas_agree_on_it(self, lab):
        def replica(exchange):
            return skipping(
                lab, (0, 0), 2, sync_every=4, flush="partial" if exchange.rank else "none"
            )(exchange)

        for result in run_replicas(replica, in_process(2)):
            assert "setting 'flush'" in str(result)
