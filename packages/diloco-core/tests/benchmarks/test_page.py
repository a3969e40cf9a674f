"""The table and the picture that the documentation shows are those that the kept results give."""

import shutil
from dataclasses import asdict

import pytest


@pytest.fixture
def made(proof):
    """Results of a codec that costs 3 % of the loss, and of a link that is too slow."""
    losses = proof.results.Results(
        None, {}, {"plain": {"0": 2.0, "1": 3.0}, "int8": {"0": 2.04, "1": 3.12}}
    )
    time = proof.timing.Time("sharded", 0.5, 0.53, 1.0, 1.0, 0.0, 100.0, 200.0, 100.0, 190.0)
    times = proof.results.Results(None, {}, {"plain": {"slow": [asdict(time)]}})
    return losses, times


class TestTheRepository:
    def test_table_and_picture_are_those_of_the_results(self, proof, tmp_path):
        page = proof.page.PAGE
        copy = tmp_path / page.name
        shutil.copy(page, copy)
        proof.page.write(copy)
        command = "run `hatch run bench-proof page`"
        assert copy.read_text() == page.read_text(), command
        picture = (tmp_path / proof.page.PICTURE).read_text()
        assert picture == (page.parent / proof.page.PICTURE).read_text(), command


class TestGoals:
    def test_what_is_missed_is_said(self, proof, made):
        texts = {goal.text: goal.met for goal in proof.goals.goals(*made)}
        assert texts == {
            "8 bits (int8): the loss is +3.0% against DiLoCo; goal: at most +1%": False,
            "DiLoCo trains 50.0% of the time (slow link; planned: 53.0%); goal: at most 2 points "
            "from it": False,
            "bytes on the slow link differ from the planner's by 5.1% at most; goal: 5%": False,
        }
        table = proof.page.tables(*made)
        assert "Met are 0 of 3 goals" in table
        assert all(f"\n* {text}" in table for text in texts)

    @pytest.mark.parametrize(
        ("utilisation", "bound", "met"),
        [(0.989, 0.99, False), (0.99, 1.0, True), (0.97, 0.985, True), (0.5, 0.525, False),
         (0.55, 0.525, False)],
    )  # fmt: skip
    def test_shares_of_time(self, proof, made, utilisation, bound, met):
        losses, times = made
        times.found["plain"]["slow"][0] |= {"utilisation": utilisation, "bound": bound}
        assert proof.goals.goals(losses, times)[1].met == met

    @pytest.mark.parametrize(("received", "fewer", "met"), [(3.4, 51, True), (4.0, 46, False)])
    def test_bytes_are_compared_with_those_of_plain_diloco(self, proof, made, received, fewer, met):
        """Against 100 bytes sent and 200 received, and not with those of means at every step."""
        losses, times = made
        (plain,) = times.found["plain"]["slow"]
        times.found["topk64"] = {"slow": [plain | {"sent": 2.5, "received": received}]}
        times.found["synchronous"] = {"slow": [plain | {"sent": 1e6}]}
        (goal,) = (goal for goal in proof.goals.goals(losses, times) if "fewer" in goal.text)
        assert f" moves {fewer} times fewer bytes than DiLoCo; goal: at least 50" in goal.text
        assert goal.met == met
        del times.found["plain"]
        assert not any("fewer" in goal.text for goal in proof.goals.goals(losses, times))

    def test_a_loss_is_compared_seed_by_seed(self, proof, made):
        losses, _ = made
        del losses.found["int8"]["1"]
        row = next(row for row in proof.rows.ROWS if row.name == "int8")
        assert proof.goals.change(row, losses) == pytest.approx([0.02])
