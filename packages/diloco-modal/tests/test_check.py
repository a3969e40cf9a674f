"""What stands in the way of a launch: what is there, what is missing, and what is unknown."""

import pytest

from diloco_modal._client._client import Client
from diloco_protocol import Backoff, InvalidRequestError, Reason

URI = "s3://bucket/run-1"


def found(findings):
    return {finding.subject: finding.ok for finding in findings}


def told(findings, subject):
    (message,) = [finding.message for finding in findings if finding.subject == subject]
    return message


@pytest.fixture
def check(lab):
    """Checks a launch; ``play`` is what the container does at each pause of the launcher."""

    def act(n=1, play=lambda: None, **options):
        def sleep(seconds):
            play()
            lab.world.advance(seconds)

        backoff = Backoff(first=0.1, clock=lab.world.now, sleep=sleep)
        return lab.executor(backoff=backoff).check(n, **options)

    return act


@pytest.fixture
def probe(lab):
    """Ends the call that tries a rendezvous."""

    def end(result=None, **options):
        for call in lab.world.calls():
            if call.status == "pending":
                call.start()
                call.end(lab.outcome(result, **options))

    return end


def test_what_no_call_has_told_is_not_known(check, lab):
    findings = check(2, gpu="H100")
    assert found(findings) == {"token": True, "app": True, "version": None}
    assert "give rendezvous_uri=" in told(findings, "version")
    assert not lab.world.calls()
    assert lab.executor().list_runs() == []


@pytest.mark.parametrize("place", [{"region": "us-east"}, {"region": "eu", "cloud": "gcp"}])
def test_a_place_is_known_when_a_call_has_run_there(check, lab, probe, place):
    def act(**options):
        backoff = Backoff(first=0.1, clock=lab.world.now, sleep=sleep)
        return lab.executor(backoff=backoff, **place).check(**options)

    def sleep(seconds):
        probe({"exclusive": True, "seconds": 0.5})
        lab.world.advance(seconds)

    findings = act()
    assert found(findings)["version"] is None
    assert "whether Modal has region= and cloud=" in told(findings, "version")
    findings = act(rendezvous_uri=URI)
    assert found(findings)["version"] is True
    (call,) = lab.world.calls()
    assert call.options["regions"] == ([place["region"]] if "region" in place else [])
    assert call.options["cloud"] == place.get("cloud", "")


def test_an_app_that_is_not_deployed(lab):
    findings = lab.executor(app="other").check(rendezvous_uri=URI)
    assert found(findings) == {"token": True, "app": False}
    assert "modal deploy my_app.py" in told(findings, "app")


def test_secrets_that_are_there_and_one_that_is_not(check, lab):
    lab.world.add_secret("tokens", {"HF_TOKEN": "1"})
    assert found(check(secrets={"HF_TOKEN": "tokens"}))["secrets"] is True
    findings = check(secrets={"KEY": "tokens"}, rendezvous_uri=URI)
    assert found(findings) == {"token": True, "app": True, "secrets": False}
    words = "missing key(s): KEY. Make it with all its keys: modal secret create --force "
    assert words in told(findings, "secrets")
    assert not lab.world.calls()


@pytest.mark.parametrize(
    ("exclusive", "words"),
    [(True, "conditional writes included"), (False, "only runs with fixed membership")],
)
def test_a_call_without_a_gpu_tries_the_rendezvous_and_is_removed(
    check, lab, probe, exclusive, words
):
    lab.world.add_secret("tokens", {"HF_TOKEN": "1"})
    result = {"exclusive": exclusive, "seconds": 0.5}
    findings = check(
        2,
        lambda: probe(result),
        gpu="H100",
        env={"A": "1"},
        secrets={"HF_TOKEN": "tokens"},
        rendezvous_uri=URI,
    )
    assert found(findings) == dict.fromkeys(
        ("token", "app", "secrets", "version", "rendezvous"), True
    )
    assert words in told(findings, "rendezvous")
    (call,) = lab.world.calls()
    assert (call.options["gpu"], call.options["secrets"]) == ("", ["tokens"])
    ((payload,), _) = call.arguments
    assert payload["env"] == {"A": "1"}
    assert lab.executor().list_runs() == []


def test_a_call_that_cannot_use_the_rendezvous(check, lab, probe):
    findings = check(play=lambda: probe(code=1, error="access denied"), rendezvous_uri=URI)
    assert (found(findings)["rendezvous"], found(findings)["version"]) == (False, None)
    assert "access denied" in told(findings, "rendezvous")
    assert lab.executor().list_runs() == []


def test_an_app_of_another_version(check, probe):
    words = "the launcher sent a payload of version 1"
    findings = check(
        play=lambda: probe(code=2, reason=Reason.START_FAILED, error=words), rendezvous_uri=URI
    )
    assert words in told(findings, "rendezvous")


def test_a_call_that_does_not_come_is_not_known_and_ended(check, lab):
    findings = check(rendezvous_uri=URI, patience=30.0)
    assert found(findings)["rendezvous"] is None
    assert "still pending after 30 s" in told(findings, "rendezvous")
    assert [call.status for call in lab.world.calls()] == ["terminated"]
    assert lab.executor().list_runs() == []


def test_a_password_in_the_rendezvous_is_not_shown(check, probe):
    uri = "s3://key:hidden@bucket/run-1"
    findings = [
        *check(rendezvous_uri=uri, patience=30.0),
        *check(play=lambda: probe(code=1, error="denied"), rendezvous_uri=uri),
        *check(play=lambda: probe({"exclusive": True, "seconds": 1}), rendezvous_uri=uri),
    ]
    told = [each.message for each in findings if each.subject == "rendezvous"]
    assert len(told) == 3
    assert all("s3://<redacted>@bucket/run-1" in each and "hidden" not in each for each in told)


def test_a_call_that_could_not_be_ended_is_named(check, lab):
    lab.stand_in.faults.add("forbidden", verb="FunctionCallCancel", times=None)
    findings = check(rendezvous_uri=URI, patience=30.0)
    assert found(findings)["cleanup"] is False
    (run,) = lab.executor().list_runs()
    assert f"may cost money: end it with cancel_run({run!r})" in told(findings, "cleanup")


def test_ctrl_c_while_a_call_is_waited_for(lab):
    def interrupt(_):
        raise KeyboardInterrupt

    backoff = Backoff(first=0.1, clock=lab.world.now, sleep=interrupt)
    with pytest.raises(KeyboardInterrupt):
        lab.executor(backoff=backoff).check(rendezvous_uri=URI)
    assert [call.status for call in lab.world.calls()] == ["terminated"]


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_while_a_call_is_ended_names_it(lab, monkeypatch, interrupts):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "cancel", interrupt)
    sleep = lab.world.advance if interrupts == 1 else interrupt
    executor = lab.executor(backoff=Backoff(first=0.1, clock=lab.world.now, sleep=sleep))
    with pytest.raises(KeyboardInterrupt) as caught:
        executor.check(rendezvous_uri=URI, patience=1.0)
    (run,) = lab.executor().list_runs()
    (note,) = caught.value.__notes__
    assert note.endswith(f"may cost money: end it with cancel_run({run!r})")


def test_a_call_that_could_not_be_started(check, lab):
    lab.stand_in.faults.add("forbidden", verb="FunctionMap", times=None)
    findings = check(rendezvous_uri=URI)
    assert found(findings)["rendezvous"] is False
    assert "could not be launched" in told(findings, "rendezvous")


def test_what_a_launch_would_refuse_is_refused(check):
    with pytest.raises(InvalidRequestError, match="known are"):
        check(gpu="GB9000")
