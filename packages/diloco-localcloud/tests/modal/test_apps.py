"""Apps: deployed by the real client, found, bound with options, stopped."""

from __future__ import annotations

import modal
import pytest
from grpclib.exceptions import GRPCError
from modal import exception
from modal_proto import api_pb2


def train(x):
    return x


def app_of(**options):
    app = modal.App("shipped", include_source=False)
    app.function(name="train", image=modal.Image.debian_slim(), **options)(train)
    return app


@pytest.fixture
def shipped(lab):
    """An app that the client has deployed."""
    lab.world.add_secret("bucket", {"KEY": "value"})
    app = app_of(
        gpu="H100:2",
        timeout=600,
        secrets=[modal.Secret.from_name("bucket")],
        volumes={"/data": modal.Volume.from_name("data", create_if_missing=True)},
        max_containers=3,
        cpu=2.0,
        memory=(512, 1024),
        region="eu",
        cloud="aws",
        single_use_containers=True,
    )
    app.deploy(client=lab.client)
    return app


def options_of(lab, function):
    return lab.world.call(function.spawn().object_id).options


def test_a_deploy_by_the_client(lab, shipped):
    function = lab.find("shipped", "train")
    assert options_of(lab, function) == {
        "timeout": 600.0,
        "gpu": "H100",
        "gpu_count": 2,
        "cpu": 2.0,
        "memory": 512,
        "memory_limit": 1024,
        "regions": ["eu"],
        "cloud": "aws",
        "max_containers": 3,
        "secrets": ["bucket"],
    }
    first = function.object_id
    shipped.deploy(client=lab.client)
    assert lab.find("shipped", "train").hydrate().object_id == first


def test_options_of_one_launch(lab, shipped):
    bound = lab.find("shipped", "train").with_options(
        gpu="a100", timeout=60, max_containers=8, region=["us", "ap"], cloud="gcp", cpu=4
    )
    told = options_of(lab, bound)
    assert (told["gpu"], told["gpu_count"], told["timeout"]) == ("A100", 1, 60.0)
    assert told["max_containers"] == 8
    assert (told["regions"], told["cloud"], told["cpu"], told["memory"]) == (
        ["us", "ap"],
        "gcp",
        4.0,
        512,
    )
    assert told["secrets"] == ["bucket"]
    assert options_of(lab, lab.find("shipped", "train"))["gpu"] == "H100"
    assert shipped.name == "shipped"


def test_secrets_of_a_launch_replace_those_of_the_deploy(lab, shipped):
    lab.world.add_secret("other", {"KEY": "value"})
    other = modal.Secret.from_name("other", client=lab.client)
    bound = lab.find("shipped", "train").with_options(secrets=[other])
    assert options_of(lab, bound)["secrets"] == ["other"]
    assert shipped.name == "shipped"


def test_the_same_options_are_the_same_pool_of_containers(lab):
    ids = set()
    for _ in range(2):
        bound = lab.find().with_options(timeout=60)
        bound.spawn()
        ids.add(bound.object_id)
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"gpu": "H1000"}, exception.InvalidError, "Unknown GPU type 'H1000', expected one of"),
        ({"timeout": 86401}, exception.InvalidError, "between 1 second and 24 hours"),
    ],
)
def test_options_that_are_refused(lab, options, kind, message):
    with lab.refused(kind, message):
        lab.function.with_options(**options).spawn()
    assert lab.world.calls() == []


def test_an_unknown_gpu_in_a_deploy(lab):
    with lab.refused(exception.InvalidError, "Unknown GPU type 'T1000'"):
        app_of(gpu="T1000").deploy(client=lab.client)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"app": "none"}, "App 'none' not found in environment 'main'"),
        ({"name": "none"}, "App 'app' has no function 'none'"),
        ({"environment_name": "none"}, "Environment 'none' not found"),
    ],
)
def test_functions_that_are_not_there(lab, where, message):
    with lab.refused(exception.NotFoundError, message):
        lab.find(**where).hydrate()


def test_environments(lab):
    lab.world.add_environment("dev")
    lab.world.deploy("app", ["other"], environment="dev")
    lab.find(name="other", environment_name="dev").hydrate()
    modal.Environment.from_name("dev", client=lab.client).hydrate()
    with lab.refused(exception.InvalidError, "Environment 'prod' not found"):
        modal.Environment.from_name("prod", client=lab.client).hydrate()


def test_apps_by_name(lab):
    assert modal.App.lookup("app", client=lab.client).app_id.startswith("ap-")
    with lab.refused(exception.NotFoundError, "App 'other' not found"):
        modal.App.lookup("other", client=lab.client)
    made = modal.App.lookup("other", client=lab.client, create_if_missing=True)
    assert modal.App.lookup("other", client=lab.client).app_id == made.app_id


def test_a_run_that_is_not_deployed(lab):
    app = modal.App(include_source=False)
    function = app.function(name="train")(train)
    with app.run(client=lab.client):
        call = function.spawn(5)
        scripted = lab.world.call(call.object_id)
        assert scripted.app
        scripted.start()
        scripted.end(6)
        assert call.get(timeout=0) == 6
        left = lab.world.call(function.spawn(5).object_id)
    assert left.status == "terminated"  # with the app


def test_a_detached_run_goes_on(lab):
    app = modal.App(include_source=False)
    function = app.function(name="train")(train)
    with app.run(client=lab.client, detach=True):
        call = lab.world.call(function.spawn(5).object_id)
    assert call.status == "pending"


def test_an_app_that_was_stopped_takes_no_calls(lab):
    app = modal.App(include_source=False)
    function = app.function(name="train")(train)
    with app.run(client=lab.client):
        function.spawn(5)
        asked = api_pb2.FunctionMapRequest(function_id=function.object_id)
    with pytest.raises(GRPCError, match="is stopped"):
        lab.ask("FunctionMap", asked)


def test_a_secret_that_was_replaced(lab):
    lab.world.add_secret("bucket", {"KEY": "value"})
    old = modal.Secret.from_name("bucket", client=lab.client)
    old.hydrate()
    lab.world.add_secret("bucket", {"KEY": "other"})
    with lab.refused(exception.NotFoundError, "Secret with ID 'st-"):
        lab.function.with_options(secrets=[old]).spawn()


def test_stopping_an_app(lab):
    _, scripted = lab.spawn()
    app = modal.App.lookup("app", client=lab.client)
    lab.world.stop_app("app")
    with pytest.raises(GRPCError, match="App is stopped"):
        lab.ask("AppHeartbeat", api_pb2.AppHeartbeatRequest(app_id=app.app_id))
    assert scripted.status == "terminated"
    with lab.refused(exception.NotFoundError, "App 'app' not found"):
        lab.find().hydrate()
    with pytest.raises(LookupError, match="no app is deployed as 'app'"):
        lab.world.stop_app("app")
    lab.world.deploy("app", ["function"])
    lab.find().hydrate()


def test_a_redeploy_of_the_world_keeps_the_function(lab):
    before = lab.function.hydrate().object_id
    lab.world.deploy("app", ["function", "other"], timeout=60)
    assert lab.find().hydrate().object_id == before
    assert options_of(lab, lab.find(name="other"))["timeout"] == 60
    with pytest.raises(ValueError, match="there is no environment 'dev'"):
        lab.world.deploy("app", environment="dev")


def test_required_keys_of_secrets(lab):
    lab.world.add_secret("bucket", {"KEY": "value"})
    modal.Secret.from_name("bucket", required_keys=["KEY"], client=lab.client).hydrate()
    with lab.refused(exception.ConflictError, r"missing key\(s\): TOKEN"):
        modal.Secret.from_name("bucket", required_keys=["TOKEN"], client=lab.client).hydrate()
    with lab.refused(exception.NotFoundError, "Secret 'none' not found in environment 'main'"):
        modal.Secret.from_name("none", client=lab.client).hydrate()
    asked = api_pb2.SecretGetOrCreateRequest(deployment_name="bucket")
    told = lab.ask("SecretGetOrCreate", asked).metadata
    assert list(getattr(told, "keys", ["KEY"])) == ["KEY"]  # older clients do not know them
    (listed,) = modal.Secret.objects.list(client=lab.client)
    assert (listed.name, listed.info().created_by) == ("bucket", "stand-in")
    lab.world.add_secret("bucket", {"TOKEN": "value"})
    modal.Secret.from_name("bucket", required_keys=["TOKEN"], client=lab.client).hydrate()
