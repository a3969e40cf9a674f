"""The times of the proof: what replicas measure on a link, and what is planned for it."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest


@pytest.fixture(scope="module")
def conditions(proof):
    """A link that carries 100 MB/s."""
    return proof.rows.Conditions(1e8, latency=0.0, step=0.001)


def row_of(proof, name):
    return next(row for row in proof.rows.ROWS if row.name == name)


class TestReplica:
    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("name", "publish_every"), [("synchronous", 4), ("delay-e2m1", 4), ("delay-e2m1", 3)]
    )
    def test_what_passes_through_the_link_is_what_was_planned(
        self, proof, conditions, name, publish_every, tmp_path
    ):
        """Two threads in the place of processes."""
        training = proof.losses.Training(replicas=2, sync_every=4)
        row = replace(row_of(proof, name), publish_every=publish_every)
        plan = proof.timing.plan_of(row, 200_000, training, conditions)
        task = proof.timing.task_of(row, 200_000, training, conditions) | {"uri": str(tmp_path)}
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(proof.replica.main, [task | {"rank": rank} for rank in (0, 1)]))
        for each in found:
            assert each["sent"] / task["syncs"] == pytest.approx(plan.bytes_sent, rel=0.02)
            assert each["received"] / task["syncs"] == pytest.approx(plan.bytes_received, rel=0.02)
            assert each["compute"] > 0


class TestTimeOf:
    def test_shares_and_bounds(self, proof, monkeypatch):
        """Bytes and seconds are those of H inner steps, shares are means over the replicas."""
        seen = []

        def run(task):
            seen.append(task)
            return [
                {"compute": 45.0, "exposed": 5.0, "hidden": 2.0, "sent": 80.0, "received": 160.0},
                {"compute": 35.0, "exposed": 0.0, "hidden": 4.0, "sent": 80.0, "received": 160.0},
            ]

        monkeypatch.setattr(proof.timing, "_run", run)
        training = proof.losses.Training(replicas=2, sync_every=32)
        slow = proof.rows.Conditions(1e5, latency=0.0, step=0.5, rounds=4)
        row = row_of(proof, "streaming")
        share = proof.timing.time_of(row, 1e6, training, slow)
        plan = proof.timing.plan_of(row, 1e6, training, slow)
        assert (seen[0]["syncs"], seen[0]["warm"]) == (16, 4), "four fragments, four rounds"
        assert seen[0]["options"]["delay"] == 4
        assert share.utilisation == pytest.approx(0.95)
        assert (share.compute, share.exposed, share.hidden) == pytest.approx((10, 0.625, 0.75))
        assert (share.sent, share.received) == (20, 40)
        planned = (share.planned_sent, share.planned_received)
        assert planned == (4 * plan.bytes_sent, 4 * plan.bytes_received)
        # There are 2.5 seconds of training between two syncs, and half of them go on beside a sync.
        assert share.bound == pytest.approx(2.5 / (2.5 + plan.seconds - 1.25))
        assert plan.seconds > 1.25

    @pytest.mark.slow
    @pytest.mark.processes
    @pytest.mark.parametrize("over", ["folder", "s3"])
    @pytest.mark.parametrize("name", ["synchronous", "plain", "streaming"])
    def test_with_processes(self, proof, over, name):
        training = proof.losses.Training(replicas=2)
        fast = proof.rows.Conditions(1e8, latency=0.0, step=0.01, over=over)
        share = proof.timing.time_of(row_of(proof, name), 500_000, training, fast)
        assert 0 < share.utilisation < 1
        assert share.sent == pytest.approx(share.planned_sent, rel=0.03)
        assert share.received == pytest.approx(share.planned_received, rel=0.03)


class TestMeasureTimes:
    def test_what_was_measured_is_not_measured_again(self, proof, tmp_path, monkeypatch):
        measured = []

        def time_of(row, parameters, training, link):
            measured.append((row.name, link.over))
            times = (0.5, 8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
            return proof.timing.Time("sharded", 1 / len(measured), *times)

        monkeypatch.setattr(proof.command, "time_of", time_of)
        rows = [row_of(proof, name) for name in ("alone", "plain")]
        measure = proof.command.measure_times
        measure(rows, tmp_path, ["slow", "s3"])
        measure(rows, tmp_path, ["slow", "s3"])
        assert measured == [("plain", "folder"), ("plain", "s3")]
        measure(rows, tmp_path, ["slow"], times=3)
        assert len(measured) == 4
        kept = proof.results.Results.of(tmp_path / "times.json")
        assert kept.time("plain", "slow").utilisation == pytest.approx(1 / 3), "of 1, 1/3 and 1/4"
        assert kept.time("plain", "fast") is None
        setup = json.loads((tmp_path / "times.json").read_text())["setup"]
        assert setup["links"]["s3"] == asdict(proof.rows.LINKS["s3"])


def test_only_what_was_asked_for_is_forgotten(proof, tmp_path):
    path = tmp_path / "times.json"
    results = proof.results.Results.of(path, {"parameters": 5})
    for name, link in (("plain", "slow"), ("plain", "s3"), ("int8", "slow")):
        results.add(name, link, [])
    rows = [row_of(proof, name) for name in ("plain", "alone")]
    proof.command.forget(tmp_path, ["losses", "times"], rows, ["s3", "fast"])
    assert proof.results.Results.of(path).found == {"plain": {"slow": []}, "int8": {"slow": []}}
    proof.command.forget(tmp_path, ["losses"], rows, ["slow"])
    assert "plain" in proof.results.Results.of(path).found
    proof.command.forget(tmp_path, ["times"], [*rows, row_of(proof, "int8")], ["slow"])
    assert not path.exists(), "so that another setup may be measured"


def test_what_was_measured_is_planned_again(proof, tmp_path):
    """As it was planned when it was measured, as long as the planner says the same."""
    training, slow = proof.losses.Training(), proof.rows.LINKS["slow"]
    results = proof.results.Results.of(tmp_path / "times.json", {"parameters": 500_000})
    row = row_of(proof, "streaming")
    time = proof.timing.Time("sharded", 0.4, 0.0, 4.1, 6.0, 2.0, 3e6, 3e6, 0.0, 0.0)
    results.add_time("streaming", "slow", time)
    proof.command.plan_again(tmp_path)
    found = proof.results.Results.of(tmp_path / "times.json").time("streaming", "slow")
    plan = proof.timing.plan_of(row, 500_000, training, slow)
    assert found.planned_sent == pytest.approx(4 * plan.bytes_sent, rel=1e-5)
    assert found.planned_received == pytest.approx(4 * plan.bytes_received, rel=1e-5)
    assert found.bound == pytest.approx(1 - plan.blocked(4.1 / 4, 4.1 / 8), rel=1e-5)
    assert replace(found, bound=0.0, planned_sent=0.0, planned_received=0.0) == time
