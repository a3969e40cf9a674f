"""``resume=True`` where there is no run, as after a typing error."""

import pytest

from diloco_core import RendezvousError, connect


def test_no_folder_is_left_behind(lab, tmp_path):
    place = tmp_path / "runs" / "other"
    exchange = connect(str(place), rank=0, world_size=1, resume=True)
    outer, _ = lab.outer_loop(lab.small_model(), exchange)
    with pytest.raises(RendezvousError, match="holds no run to resume"), outer:
        pass
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    exchange = connect(str(place), rank=0, world_size=1, resume=True)
    exchange.leave()
    assert not list((tmp_path / "runs").iterdir())
