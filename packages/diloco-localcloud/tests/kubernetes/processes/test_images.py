"""Images that cannot be pulled."""

from __future__ import annotations

import pytest
from processes_lab import ended
from standin_lab import PATIENCE


@pytest.mark.processes
def test_an_image_that_cannot_be_pulled(clients, stand_in, run):
    stand_in.images.first_seconds = 0.5
    stand_in.images.refuse("any")
    run("pass")

    def refused():
        found = stand_in.pods.of("run", "ns")
        statuses = found[0].json["status"].get("containerStatuses", []) if found else []
        return statuses and statuses[0]["state"]["waiting"]["reason"] == "ErrImagePull"

    stand_in.pods.wait_for(refused, PATIENCE)
    stand_in.images.allow("any")
    assert ended(stand_in)["exitCode"] == 0
