"""What the package shows."""

import modal
import pytest

import diloco_modal
from diloco_modal import ModalSpawnExecutor, build_app
from diloco_protocol import InvalidRequestError, ServerlessExecutor


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


def test_every_call_has_a_container_of_its_own_and_modal_starts_nothing_again(monkeypatch):
    """Or a cancel would end other replicas, too, and a failed replica would be trained again."""
    chosen = {}

    def function(_, **options):
        chosen.update(options)
        return lambda run: run

    monkeypatch.setattr(modal.App, "function", function)
    build_app(region="us-east")
    assert (chosen["retries"], chosen["single_use_containers"]) == (0, True)
    assert chosen["region"] == "us-east"


@pytest.mark.parametrize("name", ["retries", "single_use_containers"])
def test_what_the_app_decides_itself_is_refused(name):
    with pytest.raises(InvalidRequestError, match=f"build_app sets {name} of the function itself"):
        build_app(**{name: 3})


def test_a_prefix_that_no_run_can_have_is_refused_at_once():
    with pytest.raises(InvalidRequestError, match="run_id='Bad Name!' cannot begin"):
        ModalSpawnExecutor(run_id="Bad Name!")
