"""What is asked of Modal, and what is refused before anything is."""

from types import SimpleNamespace

import modal
import pytest

from diloco_modal import ModalSpawnExecutor, build_app
from diloco_protocol import (
    AuthError,
    BackendError,
    InvalidRequestError,
    ReplicaNotFoundError,
    UnavailableError,
)


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({"app": "other"}, r"modal deploy my_app\.py.*build_app\('other', function='replica'"),
        ({"function": "other"}, r"modal deploy my_app\.py.*build_app\('diloco', function='other'"),
    ],
)
def test_what_is_not_deployed_is_named_with_the_command(lab, options, command):
    with pytest.raises(InvalidRequestError, match=command):
        lab.launch(1, lab.executor(**options))
    assert lab.executor().list_runs() == []


def test_a_secret_without_the_key_is_named(lab):
    lab.world.add_secret("tokens", {"OTHER": "1"})
    again = r"HF_TOKEN\. Make it with all its keys: modal secret create --force tokens NAME=VALUE"
    with pytest.raises(InvalidRequestError, match=again):
        lab.launch(1, secrets={"HF_TOKEN": "tokens"})
    lab.world.add_secret("huggingface", {"HF_TOKEN": "1"})
    assert lab.launch(1, secrets={"HF_TOKEN": "huggingface"})


def test_a_secret_that_could_not_be_looked_for_may_be_there(lab):
    lab.world.add_secret("huggingface", {"HF_TOKEN": "1"})
    lab.stand_in.faults.add("server_error", verb="SecretGetOrCreate", times=None)
    with pytest.raises(UnavailableError):
        lab.launch(1, secrets={"HF_TOKEN": "huggingface"})
    assert not lab.world.calls()


def test_secrets_of_the_app_are_kept_if_they_are_named(lab):
    """What a launch names replaces those of the app."""
    lab.world.add_secret("bucket", {"AWS_ACCESS_KEY_ID": "1"})
    lab.world.add_secret("huggingface", {"HF_TOKEN": "1"})
    secrets = {"HF_TOKEN": "huggingface"}
    (handle,) = lab.launch(1, lab.executor(app_secrets=["bucket"]), secrets=secrets)
    assert lab.call(handle).options["secrets"] == ["bucket", "huggingface"]
    with pytest.raises(InvalidRequestError, match=r"modal secret create --force other"):
        lab.launch(1, lab.executor(app_secrets=["other"]), secrets=secrets, run_id="two")


@pytest.fixture
def declared(lab):
    """Deploys an app whose function has these Secrets."""

    def deploy(*secrets):
        build_app("own", secrets=secrets).deploy(client=lab.client)
        return lab.executor(app="own")

    lab.world.add_secret("bucket", {"AWS_ACCESS_KEY_ID": "1"})
    lab.world.add_secret("huggingface", {"HF_TOKEN": "1"})
    return deploy


tells_secrets = pytest.mark.skipif(
    isinstance(modal.Function.info, property),
    reason="clients of Modal before 1.6 do not tell the Secrets of a function",
)


@tells_secrets
def test_secrets_of_a_launch_join_those_of_the_app(lab, declared):
    executor = declared(modal.Secret.from_name("bucket"), modal.Secret.from_name("huggingface"))
    (handle,) = lab.launch(1, executor, secrets={"HF_TOKEN": "huggingface"})
    assert lab.call(handle).options["secrets"] == ["bucket", "huggingface"]
    (handle,) = lab.launch(1, executor, run_id="two")
    assert lab.call(handle).options["secrets"] == ["bucket", "huggingface"]
    assert lab.stand_in.calls.count("SecretList") == 1


@tells_secrets
def test_a_secret_of_the_app_that_nobody_can_name_is_not_taken_away(lab, declared):
    executor = declared(modal.Secret.from_dict({"AWS_ACCESS_KEY_ID": "1"}))
    with pytest.raises(
        InvalidRequestError, match=r"take 1 of the app's Secrets away.* \(st-.*from_name"
    ):
        lab.launch(1, executor, secrets={"HF_TOKEN": "huggingface"})
    assert lab.executor().list_runs() == []
    assert lab.launch(1, executor)


def test_an_environment_that_is_not_there_is_no_missing_app(lab):
    executor = lab.executor(environment_name="prod")
    with pytest.raises(
        InvalidRequestError, match=r"[^.]\. .*modal environment create prod"
    ) as caught:
        lab.launch(1, executor)
    assert "deploy" not in str(caught.value)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "GB300"}, "known are T4, L4"),
        ({"gpu": "H100:9"}, "at most 8"),
        ({"gpu": "X" * 1_000_000}, "XX.{0,400} is not a GPU of Modal"),
        ({"gpu": "T" + " 4" * 500_000}, "T 4.{0,400} is not a GPU of Modal"),
        ({"gpu": "A10:5"}, "at most 4"),
        ({"gpu": "B200+:9"}, "at most 8"),
        ({"gpu": "H200!"}, "known are T4, L4"),
        ({"timeout": None}, "timeout"),
        ({"timeout": 86_400}, "timeout"),
        ({"timeout": 40_000, "max_restarts": 2}, "needs a call of"),
        ({"cpu": "many"}, "number of CPUs"),
        ({"cpu": "9" * 1_000_000}, "^cpu='9.{0,400}such as 4 or '0.5'$"),
        (
            {"cpu": "0.0004"},
            "number of CPUs from 0.001",
        ),  # Modal's client makes 0 of it, which is the default
        ({"memory": "16 GiB"}, "amount of memory"),
        ({"memory": "16385Gi"}, "amount of memory from 1Mi to 16384Gi"),
        ({"memory": "9" * 400}, "amount of memory"),
        ({"gpu": "T4", "spot": False}, "spot=False"),
        ({"spot": False}, "spot=False"),
        ({"env": {f"A{n}": "x" * 130_000 for n in range(40)}}, "4194304 are allowed"),
        ({"labels": {"a": "x" * 9_000_000}}, "labels of a replica have .* 4194304 are allowed"),
        ({"labels": {"a": "\U0001f600" * 400_000}}, "have 480.... bytes"),  # 12 bytes each
    ],
)
def test_refused_before_the_first_call(lab, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        lab.launch(1, **options)
    assert not lab.world.calls()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "x"),
        ({1, 2}, "x"),
        (float("nan"), "x"),
        (b"bytes", "x"),
        ("x" * 5_000_000, "4194304 are allowed"),
    ],
    ids=["object", "set", "nan", "bytes", "too large"],
)
def test_arguments_that_cannot_travel_are_refused_before_the_first_call(lab, value, message):
    before = len(lab.stand_in.calls)
    with pytest.raises(InvalidRequestError, match=message):
        lab.executor().launch_replicas(1, "trainer:train", {"x": value}, run_id="run")
    assert len(lab.stand_in.calls) == before


@pytest.mark.parametrize(
    ("memory", "asked"),
    [
        ("16Gi", 16384),
        ("16G", 15258),
        ("512Mi", 512),
        ("512M", 488),
        ("1073741824", 1024),
        (" 1.5Gi ", 1536),
    ],
)
def test_memory_is_asked_for_in_mebibytes(lab, memory, asked):
    (request,) = lab.executor().plan(1, "trainer:train", memory=memory, timeout=60).requests
    assert request["options"]["memory"] == asked


@pytest.mark.parametrize("restarts", [0, 3])
def test_the_longest_timeout_is_allowed_and_a_longer_one_is_not(lab, restarts):
    executor = lab.executor(max_restarts=restarts, grace=20.0)
    longest = executor.capabilities.max_timeout
    shares = {0: longest, restarts: (longest + 20.0) / (1 + restarts) - 20.0}
    for each, share in shares.items():  # the launch may ask for fewer than the executor
        (request,) = executor.plan(1, "trainer:train", timeout=share, max_restarts=each).requests
        assert request["options"]["timeout"] == 86_400
        with pytest.raises(InvalidRequestError, match="timeout"):
            executor.plan(1, "trainer:train", timeout=share + 1, max_restarts=each)


def test_a_region_and_a_cloud_are_asked_for(lab):
    (handle,) = lab.launch(1, lab.executor(region="us-east", cloud="aws"))
    options = lab.call(handle).options
    assert (options["regions"], options["cloud"]) == (["us-east"], "aws")


@pytest.mark.parametrize("value", ["us-east,us-west", "US East", "us_east", "-us", "ü"])
@pytest.mark.parametrize("name", ["region", "cloud"])
def test_a_place_that_is_not_one_name_is_refused(name, value):
    """Modal's client passes on any text."""
    with pytest.raises(InvalidRequestError, match=f"{name} must be one name"):
        ModalSpawnExecutor(**{name: value})


@pytest.mark.parametrize("name", ["request_timeout", "pending_timeout"])
def test_no_time_at_all_is_refused(name):
    with pytest.raises(InvalidRequestError, match=f"{name} must be"):
        ModalSpawnExecutor(**{name: 0})


def test_no_token(monkeypatch):
    def refuse():
        raise modal.exception.AuthError("Token missing.")

    monkeypatch.setattr(modal.Client, "from_env", SimpleNamespace(aio=refuse))
    executor = ModalSpawnExecutor()
    with pytest.raises(AuthError, match=r"Token missing\. Run 'modal token new'"):
        executor.launch_replicas(1, "trainer:train")
    assert [finding.ok for finding in executor.check(1, rendezvous_uri="s3://b")] == [False]


def test_a_server_that_does_not_answer(lab):
    executor = lab.executor(request_timeout=0.2, retry_timeout=0)
    (handle,) = lab.launch(1)
    lab.stand_in.faults.add(
        "delay", verb="FunctionGetOutputs", resource="modal", seconds=3, times=2
    )
    with pytest.raises(UnavailableError, match=r"did not answer within 0\.2 s"):
        executor.describe(handle)


def test_the_plan_shows_no_secret(lab):
    plan = lab.executor().plan(
        1, "trainer:train", {"api_key": "abc"}, env={"HF_TOKEN": "def"}, run_id="run"
    )
    (request,) = plan.requests
    assert request["payload"]["env"] == {"HF_TOKEN": "<redacted>"}
    assert request["payload"]["spec"]["kwargs"] == {"api_key": "<redacted>"}
    assert not lab.world.calls()


@pytest.mark.parametrize("name", ["../..", "Über"])
def test_no_run_has_such_a_name(lab, name):
    executor = lab.executor()
    for verb in (executor.attach, executor.cancel_run):
        with pytest.raises(ReplicaNotFoundError):
            verb(name)
    with pytest.raises(InvalidRequestError, match="not None"):
        executor.cancel_run(None)
    assert not lab.stand_in.calls.count("DictGetOrCreate")


def test_what_the_client_refuses_is_no_error_of_python(lab, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("Value out of range")

    monkeypatch.setattr(modal.Function, "with_options", refuse)
    with pytest.raises(BackendError, match=r"choosing options of .* out of range"):
        lab.launch(1)


def test_a_function_whose_name_is_a_method_s_is_refused():
    for make in (ModalSpawnExecutor, lambda **name: build_app("app", image=None, **name)):
        with pytest.raises(InvalidRequestError, match="function must be a name without a dot"):
            make(function="x.y")


@pytest.mark.parametrize(("value", "kind"), [(5, "int"), (modal.Client, "type")])
def test_a_client_that_is_none_is_refused_at_once(value, kind):
    with pytest.raises(
        InvalidRequestError, match=rf"client must be a modal\.Client, not a value of type {kind}"
    ):
        ModalSpawnExecutor(client=value)
