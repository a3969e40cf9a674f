"""What Modal's own tools obey, and its spellings: each is obeyed here, too."""

import json
import os
import re
import subprocess
import sys
import traceback

import cbor2
import modal
import pytest
from modal import config
from modal._utils.function_utils import parse_gpu_config

from diloco_localcloud import ModalStandIn
from diloco_modal import ModalSpawnExecutor
from diloco_protocol import AuthError

# How each setting of Modal's client is obeyed. All of them are, since everything goes through that
# client; what is new there has to be looked at, and put into one of these.
OF_THE_CONNECTION = {
    "server_url", "token_id", "token_secret", "oauth_refresh_token", "oauth_client_id",
    "oauth_client_secret", "oauth_jwt_key", "disable_api_proxy", "override_headers",
    "max_throttle_wait", "traceback",
}  # fmt: skip
OF_LOGGING = {"loglevel", "log_format", "log_pattern", "async_warnings"}
OF_OBJECTS = {"environment", "payload_format"}
OF_A_DEPLOY = {
    "dev_suffix", "build_validation", "image_builder_version", "force_build", "ignore_cache",
    "default_cloud", "serve_timeout", "strict_parameters", "function_runtime",
    "function_runtime_debug", "runtime_perf_record", "logs_timeout",
}  # fmt: skip
OF_WHAT_WE_DO_NOT_USE = {
    "sandbox_v2", "sandbox_channel_idle_timeout", "use_control_plane_sidecar_create",
    "volume_block_read_timeout", "streams_url",
}  # fmt: skip
OF_CONTAINERS = {
    "sync_entrypoint", "heartbeat_interval", "worker_id", "task_id", "image_id",
    "cuda_checkpoint_path", "restore_state_path", "snapshot_debug",
}  # fmt: skip


def test_every_setting_was_looked_at():
    known = OF_THE_CONNECTION | OF_LOGGING | OF_OBJECTS | OF_A_DEPLOY
    assert set(config._SETTINGS) <= known | OF_WHAT_WE_DO_NOT_USE | OF_CONTAINERS


LAUNCH = """
import json
from diloco_modal import ModalSpawnExecutor
executor = ModalSpawnExecutor(request_timeout=60)
found = [(each.subject, each.ok, each.message) for each in executor.check()]
handles = executor.launch_replicas(1, "t:t", run_id="run") if found[0][1] else []
print(json.dumps([found, [handle.metadata["environment"] for handle in handles]]))
"""


def in_a_process(tmp_path, text, **variables):
    """What a launcher of its own finds, with a file of settings."""
    file = tmp_path / "modal.toml"
    file.write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MODAL_")}
    env = {**kept, "MODAL_CONFIG_PATH": str(file), **variables}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])  # the client prints, too


def profile(name, stand_in, **more):
    told = {
        "server_url": stand_in.url,
        "token_id": stand_in.environment["MODAL_TOKEN_ID"],
        "token_secret": stand_in.environment["MODAL_TOKEN_SECRET"],
        **more,
    }
    return f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("variables", "environment"),
    [
        ({"MODAL_PROFILE": "b"}, "main"),
        pytest.param({}, "dev", marks=pytest.mark.slow),
        pytest.param({"MODAL_ENVIRONMENT": "prod"}, "prod", marks=pytest.mark.slow),
    ],
)
def test_profiles_and_variables(tmp_path, variables, environment):
    with ModalStandIn() as stand_in:
        stand_in.world.deploy("diloco", ["replica"])
        for name in ("dev", "prod"):
            stand_in.world.add_environment(name)
            stand_in.world.deploy("diloco", ["replica"], environment=name)
        text = profile("a", stand_in, environment="dev", active=True) + profile("b", stand_in)
        found, environments = in_a_process(tmp_path, text, **variables)
    assert [found[0][:2], found[1][:2]] == [["token", True], ["app", True]]
    assert environments == [environment]


SLOW = {"marks": pytest.mark.slow}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "variables", "words"),
    [
        ("[a\n", {}, "Error when reading the modal configuration"),
        pytest.param("a = 1\n", {}, "must contain table sections", **SLOW),
        pytest.param(
            "[a]\nactive = true\n[b]\nactive = true\n", {}, "More than one Modal profile", **SLOW
        ),
        pytest.param(
            "[a]\n", {"MODAL_PROFILE": "c"}, "Token missing|profile 'c' was not found", **SLOW
        ),
        pytest.param(
            "",
            {"MODAL_TOKEN_ID": "1", "MODAL_OAUTH_CLIENT_ID": "2"},
            "cannot both be configured",
            **SLOW,
        ),
    ],
)
def test_settings_that_are_wrong_are_a_finding(tmp_path, text, variables, words):
    ((finding,), _) = in_a_process(tmp_path, text, **variables)
    assert finding[:2] == ["token", False]
    assert re.search(words, finding[2])


SECRET = "as-abcdefghijk"


@pytest.mark.parametrize("end", ["\n", "\nrest", "\u200b", "\u00e9", "\t"])
def test_a_token_that_cannot_be_sent_is_not_shown(monkeypatch, end):
    with ModalStandIn() as stand_in:
        monkeypatch.setenv("MODAL_SERVER_URL", stand_in.url)
        client = modal.Client.from_credentials("ak-1", SECRET + end)
        executor = ModalSpawnExecutor(client=client, environment_name="main", retry_timeout=0)
        for verb in (executor.list_runs, lambda: executor.launch_replicas(1, "t:t")):
            with pytest.raises(AuthError, match="a token that was given") as caught:
                verb()
            assert SECRET not in "".join(traceback.format_exception(caught.value))


VERBS = """
import json
from diloco_modal import ModalSpawnExecutor, build_app
from diloco_protocol import DilocoError, ReplicaHandle
executor, said = ModalSpawnExecutor(retry_timeout=0), []
metadata = {
    "app": "diloco", "function": "replica", "environment": "main", "function_call_id": "fc-1",
    "launch": "x", "launched_at": "2026-01-01T00:00:00+00:00",
}
handle = ReplicaHandle(0, executor.backend_name, metadata, run_id="run", world_size=1)
for verb in (
    lambda: executor.launch_replicas(1, "t:t"), executor.list_runs, lambda: executor.attach("run"),
    lambda: executor.exists("run"), lambda: executor.cancel_run("run"),
    lambda: executor.describe(handle), lambda: executor.cancel(handle),
    lambda: executor.purge(handle), lambda: executor.stream_logs(handle), build_app,
):
    try:
        verb()
    except DilocoError as error:
        said.append([type(error).__name__, str(error), error.__cause__ is not None])
print(json.dumps(said))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("before", "variables", "kind", "words"),
    [
        ("", {"MODAL_LOGLEVEL": "BANANA"}, "InvalidRequestError", "BANANA"),
        (
            "import sys; sys.modules['modal'] = None",
            {},
            "MissingDependencyError",
            "pip install 'modal",
        ),
    ],
)
def test_every_verb_without_a_client(before, variables, kind, words):
    done = subprocess.run(
        [sys.executable, "-c", before + VERBS],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said) == 10
    assert (said[0][0], words in said[0][1], said[0][2]) == (kind, True, True)


def test_the_format_of_payloads(lab, monkeypatch):
    monkeypatch.setenv("MODAL_PAYLOAD_FORMAT", "cbor")
    (handle,) = lab.launch(1)
    payload = lab.stand_in._workspace.calls.by_id(handle.metadata["function_call_id"]).payload
    ((told,), _) = cbor2.loads(payload.data)
    assert (told["rank"], told["record"]) == (0, "diloco-run")


@pytest.mark.sampled
@pytest.mark.parametrize("gpu", ["H100!", "h100!:2", "B200+", "b200+:8", "H100:8", "any:2"])
def test_gpus_as_modal_spells_them(lab, gpu):
    (handle,) = lab.launch(1, gpu=gpu)
    wanted, options = parse_gpu_config(gpu), lab.call(handle).options
    assert (options["gpu"], options["gpu_count"]) == (wanted.gpu_type, wanted.count)
