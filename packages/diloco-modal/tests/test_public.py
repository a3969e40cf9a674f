"""What the package shows."""

import pytest

import diloco_modal
from diloco_modal import ModalSpawnExecutor, build_app
from diloco_protocol import ServerlessExecutor


def test_all_is_sorted_and_complete():
    assert diloco_modal.__all__ == sorted(diloco_modal.__all__)


@pytest.mark.parametrize("name", ["ModalOptions", "ModalSpawnExecutor", "build_app", "run_replica"])
def test_public_names_are_documented(name):
    assert (getattr(diloco_modal, name).__doc__ or "").strip()


def test_it_is_an_executor():
    executor = ModalSpawnExecutor()
    assert isinstance(executor, ServerlessExecutor)
    assert executor.backend_name == "modal"
    assert executor.capabilities.calls_per_look == "rank"


def test_the_app_has_the_function(lab):
    app = build_app("shipped", function="train")
    app.deploy(client=lab.client)
    handles = lab.launch(1, lab.executor(app="shipped", function="train"))
    assert lab.call(handles[0]).app == "shipped"
