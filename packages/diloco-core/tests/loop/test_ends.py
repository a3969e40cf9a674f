"""Test how runs end: partial periods, unequal numbers of steps, and models that end the same."""

import keys_lab
import pytest
import torch
from loop_lab import exchanges, live, loop

from diloco_core import FencedError, SyncError, UnequalSyncsError
from diloco_core.testing import run_replicas


def skipping(lab, skipped, steps, **options):
    """Training in which rank r skips the first ``skipped[r]`` steps, as for its gradient scaler."""

    def replica(exchange):
        model, inner, outer, _ = loop(exchange, **options)
        live(model, inner, outer, *range(skipped[exchange.rank], steps))
        copies = [copy.clone() for part in outer.state_dict()["fragments"] for copy in part["copy"]]
        values = torch.nn.utils.parameters_to_vector(model.parameters())
        assert torch.equal(values, torch.cat(copies)), "the model is the last committed state"
        return lab.values(model), outer.committed

    return replica


@pytest.mark.parametrize("kind", ["threads", "store"])
class TestSkippedSteps:
    @pytest.mark.sampled
    @pytest.mark.parametrize("skipped", [(0, 1), (1, 0), (0, 2, 1), (3, 0, 0)])
    @pytest.mark.parametrize("steps", [8, 11])
    def test_all_end_the_same(self, lab, caplog, kind, skipped, steps):
        """The flush of one meets a regular sync of another; what nobody is left for is dropped."""
        each = exchanges(kind, len(skipped))
        runs = lab.run(skipping(lab, skipped, steps, sync_every=4), each)
        assert lab.identical([values for values, _ in runs])
        fewest = min(-(-(steps - one) // 4) for one in skipped)
        assert [committed for _, committed in runs] == [fewest] * len(skipped)
        for rank, one in enumerate(skipped):
            dropped = -(-(steps - one) // 4) > fewest
            assert (f"rank {rank}: rank" in caplog.text) == dropped
        if "dropped" in caplog.text:
            assert f"has left the run after {fewest} syncs, so this replica" in caplog.text
            assert f"cannot take sync {fewest + 1}, which needs all replicas" in caplog.text
            assert f"the values of outer step {fewest}" in caplog.text

    @pytest.mark.sampled
    @pytest.mark.parametrize("flush", ["partial", "none"])
    @pytest.mark.parametrize("fragments", [1, 2])
    @pytest.mark.parametrize("skipped", [(0, 4), (0, 1, 0)])
    def test_one_that_lacks_the_last_sync_ends_the_run_for_all(
        self, lab, caplog, kind, flush, fragments, skipped
    ):
        """The last regular syncs of the others have nobody to meet."""
        options = {"sync_every": 4, "fragments": fragments, "flush": flush}
        runs = lab.run(skipping(lab, skipped, 8, **options), exchanges(kind, len(skipped)))
        assert lab.identical([values for values, _ in runs])
        (committed,) = {committed for _, committed in runs}
        whole, rest = divmod((8 - max(skipped)) * fragments, 4)
        if flush == "none":
            assert committed == whole
            assert "of this replica are not in the model: like all others, it ends" in caplog.text
        elif fragments == 1:
            assert committed == whole + bool(rest)

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("fragments", "flush", "syncs"),
        [(1, "partial", 1), (1, "none", 1), (2, "partial", 3), (2, "none", 2)],
    )
    def test_whoever_goes_on_training_stops_with_an_error(self, lab, kind, fragments, flush, syncs):
        """One that has left a whole period earlier is missed where the others go on training.

        With two fragments, steps that are taken in vain are counted from sync to sync.
        """
        options = {"sync_every": 4, "fragments": fragments, "flush": flush}
        error, _ = run_replicas(skipping(lab, (0, 8), 12, **options), exchanges(kind, 2))
        assert isinstance(error, UnequalSyncsError)
        assert error.rank == 1
        assert f"rank 1 has left the run after {syncs} sync" in str(error)
        assert f"so this replica (rank 0) cannot take sync {syncs + 1}" in str(error)
        assert "This replica is still training" in str(error)
        assert "until `outer.committed` has the same value" in str(error)

    def test_nothing_is_dropped_where_all_count_outer_steps(self, lab, caplog, kind):
        def replica(exchange):
            model, inner, outer, _ = loop(exchange)
            step = 0
            with outer:
                while outer.committed < 3:
                    if (step + exchange.rank) % 3:  # the others are skipped
                        lab.push(model, inner, exchange.rank, step)
                    step += 1
            return lab.values(model)

        assert lab.identical(lab.run(replica, exchanges(kind, 2)))
        assert "dropped" not in caplog.text


def test_nothing_stays_behind_in_the_store(lab, tmp_path):
    lab.run(skipping(lab, (0, 1), 9, sync_every=4), exchanges("store", 2, tmp_path))
    syncs = {path.name.partition(".")[0] for path in (tmp_path / "commits").iterdir()}
    contributions = list((tmp_path / "deltas").rglob("*.safetensors"))
    assert {path.parent.name for path in contributions} <= syncs
    is_note = keys_lab.of("note")
    notes = [
        path.read_text()
        for path in (tmp_path / "deltas").rglob("*")
        if is_note(path.relative_to(tmp_path).as_posix())
    ]
    assert len(notes) == 2
    assert all('"left"' in note for note in notes)


class TestWithoutAFlush:
    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", ["threads", "store"])
    @pytest.mark.parametrize("fragments", [1, 2])
    @pytest.mark.parametrize("steps", [3, 7])
    def test_the_tail_is_dropped_and_all_end_the_same(self, lab, kind, fragments, steps):
        options = {"sync_every": 4, "fragments": fragments, "flush": "none"}
        runs = lab.run(skipping(lab, (0, 0, 0), steps, **options), exchanges(kind, 3))
        assert lab.identical([values for values, _ in runs])
        assert [committed for _, committed in runs] == [steps * fragments // 4] * 3
        if steps == 3 and fragments == 1:
            assert lab.identical([runs[0][0], lab.values(loop()[0])]), "the initial values"

    def test_a_flush_by_hand_is_a_flush(self, lab):
        model, inner, outer, _ = loop(sync_every=4, flush="none")
        with outer:
            lab.push(model, inner, 0, 0)
            assert len(outer.flush()) == 1
        assert outer.committed == 1

    @pytest.mark.parametrize("topology", ["sharded", "gather"])
    def test_in_elastic_runs_too(self, lab, tmp_path, topology):
        results = []
        for steps in (5, 1):
            (exchange,) = exchanges(topology, 1, tmp_path, grace=1.0)
            results.append(skipping(lab, (0,), steps, flush="none")(exchange))
        (values, committed), (again, committed_again) = results
        assert committed == committed_again == 2
        assert lab.identical([values, again]), "what was dropped was never in the run"


def test_one_that_was_replaced_by_a_newer_incarnation_does_not_count_as_failed(lab, tmp_path):
    first, second = (loop(exchanges("gather", 1, tmp_path)[0], sync_every=1) for _ in range(2))
    model, inner, outer, _ = first

    def goes_on():
        with outer:
            lab.push(model, inner, 0, 0)
            with second[2]:
                for step in range(9):
                    lab.push(model, inner, 0, step)

    with pytest.raises(FencedError):
        goes_on()
    with pytest.raises(SyncError, match="has ended, because it was replaced"):
        outer.exchange.join(None)
    ends = [path.read_text() for path in tmp_path.rglob("*") if "leave" in path.name]
    assert ends
    assert all('"left"' in text for text in ends)
