"""Modal's environments and workspaces: an executor is for one, and says nothing of the others."""

from dataclasses import replace

import modal
import pytest

from diloco_localcloud import ModalStandIn
from diloco_protocol import AuthError, BackendError, FolderJournal, InvalidRequestError


def test_a_handle_of_another_environment_is_refused(lab):
    (handle,) = lab.launch(1)
    lab.world.add_environment("other")
    words = (
        "is of Modal's environment 'main', and this executor is for 'other': "
        ".*environment_name='main'"
    )
    with pytest.raises(InvalidRequestError, match=words):
        lab.executor(environment_name="other").describe(handle)
    theirs = replace(handle, metadata={**handle.metadata, "environment": "other"})
    for verb in ("describe", "cancel", "purge", "stream_logs"):
        with pytest.raises(InvalidRequestError, match="'other', and this executor is for 'main'"):
            getattr(lab.executor(), verb)(theirs)


def test_the_default_environment_is_the_one_of_its_name(lab):
    """The same launch, whoever repeats it, and everybody can watch and end it."""
    unnamed, named = lab.executor(), lab.executor(environment_name="main")
    for handles in (lab.launch(1, unnamed), lab.launch(1, named), lab.launch(1, lab.executor())):
        assert [each.poll(handles[0]) for each in (named, unnamed, lab.executor())] == [
            "pending"
        ] * 3
    assert handles[0].metadata["environment"] == "main"
    assert lab.call(handles[0]).arguments[0][0]["environment_name"] == "main"
    assert len(lab.world.calls()) == 1
    lab.executor(environment_name="main").cancel(handles[0])
    assert unnamed.poll(handles[0]) == "cancelled"


@pytest.mark.parametrize("profile", ["", "dev"])
def test_an_executor_stays_in_the_environment_of_its_first_call(lab, monkeypatch, profile):
    """Modal's client reads the profile for each object: the same launch would be another run."""
    for name in ("dev", "prod"):
        lab.world.add_environment(name)
        lab.world.deploy("diloco", ["replica"], environment=name)
    monkeypatch.setenv("MODAL_ENVIRONMENT", profile)
    executor = lab.executor()
    handles = lab.launch(1, executor)
    assert handles[0].metadata["environment"] == (profile or "main")
    monkeypatch.setenv("MODAL_ENVIRONMENT", "prod")
    lab.world.advance(100)
    assert lab.launch(1, executor) == handles == executor.attach("run")
    assert (executor.list_runs(), executor.poll(handles[0])) == (["run"], "pending")
    executor.cancel_run("run")
    executor.purge(handles[0])
    assert lab.executor(environment_name=profile or "main").list_runs() == []
    with pytest.raises(InvalidRequestError, match="this executor is for 'prod'"):
        lab.executor().describe(handles[0])


def test_a_journal_answers_for_the_default_environment_while_modal_is_away(lab, tmp_path):
    executor = lab.executor(journal=FolderJournal(tmp_path))
    (handle,) = lab.launch(1, executor)
    lab.begin(handle)
    lab.finish(handle, 7)
    executor.collect([handle])
    lab.stand_in.faults.add("forbidden", times=None)
    (result,) = lab.executor(journal=FolderJournal(tmp_path)).collect([handle])
    assert (result["status"], result["result"]) == ("succeeded", 7)


def test_a_default_environment_without_a_name_is_asked_for_once(lab, monkeypatch):
    monkeypatch.setattr(modal.Environment, "name", None)
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    assert (handle.metadata["environment"], executor.poll(handle)) == ("", "pending")
    verbs = [call.verb for call in lab.stand_in.calls.requests()]
    assert verbs.count("EnvironmentGetOrCreate") == 1


@pytest.mark.sampled
@pytest.mark.parametrize("verb", ["attach", "exists", "cancel_run", "list_runs", "launch"])
def test_an_environment_that_is_not_there_is_named(lab, verb, tmp_path):
    """And nothing is said of a run, which may be in the one that was meant."""
    lab.launch(1)
    for executor in (
        lab.executor(environment_name="nope"),
        lab.executor(environment_name="nope", journal=FolderJournal(tmp_path)),
    ):
        asked = {"launch": lambda one: lab.launch(1, one), "list_runs": lambda one: one.list_runs()}
        ask = asked.get(verb, lambda one: getattr(one, verb)("run"))
        with pytest.raises(
            InvalidRequestError, match=r"Environment 'nope' not found\. 'modal environment list'"
        ):
            ask(executor)


@pytest.fixture
def elsewhere(lab):
    """Another workspace, with an environment of the same name."""
    with ModalStandIn() as running:
        made = type(lab)(running)
        yield made
        made.client.__exit__(None, None, None)


def test_with_the_token_of_another_workspace_no_run_is_said_to_be_gone(lab, elsewhere, tmp_path):
    (handle,) = lab.launch(1)
    lab.begin(handle)
    journal = FolderJournal(tmp_path)
    journal.record_launch([handle])
    for chosen in ({}, {"journal": journal}):
        executor = lab.executor(client=elsewhere.client, **chosen)
        asked = {
            "describe": lambda one: one.describe(handle),
            "collect": lambda one: one.collect([handle], timeout=5),
            "cancel": lambda one: one.cancel(handle),
            "purge": lambda one: one.purge(handle),
            "stream_logs": lambda one: one.stream_logs(handle),
        }
        for ask in asked.values():
            with pytest.raises(
                AuthError,
                match=r"no record of the run 'run' .*'main'; and .* is of another workspace",
            ):
                ask(executor)
    with pytest.raises(BackendError, match="is of another workspace"):
        executor.cancel_run("run")  # which the journal knows
    assert (executor.exists("run"), executor.list_runs()) == (False, [])
    ours = lab.executor(journal=journal)
    assert (ours.poll(handle), ours.collect([handle], timeout=0)[0]["status"]) == (
        "running",
        "running",
    )


def test_nor_beside_a_run_of_its_name(lab, elsewhere):
    (handle,) = lab.launch(1)
    elsewhere.launch(1)
    elsewhere.stand_in._workspace.calls._calls.clear()  # or it may have the same id
    executor = lab.executor(client=elsewhere.client)
    for verb in (executor.cancel, executor.purge):
        with pytest.raises(
            AuthError,
            match=r"does not name the call of this handle .*; and Modal does not know its call",
        ):
            verb(handle)


def test_what_modal_knows_no_more_is_gone(lab):
    executor = lab.executor()
    (handle,) = lab.launch(1, executor)
    modal.Dict.objects.delete("diloco-run", client=lab.client)
    lab.stand_in._workspace.calls._calls.clear()
    with pytest.raises(AuthError, match="as it would for 7 days"):
        executor.cancel(handle)
    lab.world.advance(7 * 86_400)
    executor.cancel(handle)
    executor.purge(handle)
