"""Secrets stay out of what is shown."""

import json

import pytest

from diloco_protocol import Plan, ReplicaSpec, make_request
from diloco_protocol.backend import REDACTED, redact, redact_json, redact_spec, redact_text

SECRET = "hunter2secret"


def words_of(text):
    return text.split()


SECRET_NAMES = words_of(
    "HF_TOKEN AWS_SECRET_ACCESS_KEY DB_PASSWORD PGPASSWD PGPASSWORD pgpass "
    "GOOGLE_APPLICATION_CREDENTIALS WANDB_API_KEY apikey ACCESSKEY PRIVATE_KEY DB_PWD Pwd "
    "authorization tokens DB_PASS AUTH BASIC_AUTH WANDB_KEY OPENAI_KEY SSH_KEY STRIPE_KEY WEBHOOK "
    "SLACK_WEBHOOK_URL COOKIE SESSION_COOKIE AccountKey SharedAccessSignature x-api-key "
    "X-Auth-Token accessKeyId AWS_SESSION_TOKEN GITHUB_PAT authToken GITHUBTOKEN client_secret "
    "db.password --password MODAL_TOKEN_ID JWT PASSPHRASE X-Amz-Signature DB_PASS_PROD DB_PASS_OLD "
    "DB_PASS_B64 WANDB_KEY_PROD wandbKeyTeam KAGGLE_KEY_BASE64 TLS_KEY_PEM PASS_DEV HF_TOKEN_OLD "
    "GITHUB_PAT_TEST WANDB_KEY_2_OLD hf_tokens_prod DB_PW pw LDAP_BIND_PW ROOTPW DB_PW_STAGING PWD "
    "client-key-data"
)
OTHER_NAMES = words_of(
    "PATH AWS_REGION KEYBOARD keyboard monkey OMP_NUM_THREADS tokenizer TOKENISER max_tokens "
    "n_tokens tokens_per_step token_ids token_count bos_token eos_token_id KEY_FRAMES keyframe key "
    "keys primary_key public_key topologyKey KmsKeyId resource_key state_dict_keys author AUTHOR "
    "authority pathway passenger passive bypass compass forward_pass secretName secretKeyRef "
    "imagePullSecrets TOKEN_TYPE design assign signature key_value_heads KEY_FILE KEY_FILE_OLD "
    "PASS_COUNT sort_key_new cache_key_dev forward_pass_test key_old tokens_test pw_conv conv_pw "
    "mean_token_accuracy token_loss"
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_values_with_the_name_of_a_secret_are_left_out(name):
    assert redact(name, "hunter2") == REDACTED == "<redacted>"
    assert redact_json({name: "hunter2"}) == {name: REDACTED}
    assert redact_json([{"name": name, "value": "hunter2"}, {"Key": name, "Value": "hunter2"}]) == [
        {"name": name, "value": REDACTED},
        {"Key": name, "Value": REDACTED},
    ]
    assert redact_text(f"with {name}=hunter2 now") == f"with {name}={REDACTED} now"


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_values_are_shown(name):
    assert redact(name, "hunter2") == "hunter2"
    text = f"with {name}=hunter2 --{name} hunter2 {{'{name}': 'hunter2'}} now"
    assert redact_text(text) == text


@pytest.mark.parametrize("name", ["PWD", "OLDPWD"])
def test_the_folder_of_a_shell_is_shown(name):
    for folder in ("/home/me", "~/runs"):
        text = f'{name}={folder} {name}="{folder}" {name}: {folder}'
        assert redact_text(text) == text
        assert redact_json({name: folder, "a": [f"{name}={folder}"]}) == {
            name: folder,
            "a": [f"{name}={folder}"],
        }
    assert redact_text(f"Server=h;UID=u;{name}=hunter2;") == f"Server=h;UID=u;{name}={REDACTED};"


@pytest.mark.parametrize("value", ["", "None", "null", "true", "False", "0"])
def test_what_nobody_has_to_guess_is_shown(value):
    assert redact("USE_AUTH", value) == value
    assert redact_text(f"auth={value} x") == f"auth={value} x"


# Put together here, so that nobody who looks for tokens in this file finds one.
TOKENS = [
    "AKIA" + "Q3EGRIRXBIXFOMXS",
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "a1B2_" * 9,
    "glpat-" + "a1B2" * 5,
    "hf_" + "a1B2" * 9,
    "sk-" + "proj-a1B2" * 4,
    "sk-" + "ant-api03-a1B2" * 4,
    "xoxb-" + "123456789012",
    "sk_live_" + "a1B2" * 6,
    "AIza" + "a1B2c" * 7,
    "npm_" + "a1B2" * 9,
    "pypi-" + "a1B2c" * 12,
    "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxIn0xyz" + ".c2lnbmF0dXJl",
    "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIE\nabc\n-----END RSA " + "PRIVATE KEY-----",
]


@pytest.mark.parametrize("token", TOKENS, ids=lambda token: token[:8])
def test_known_tokens_are_found_wherever_they_stand(token):
    assert redact_text(token) == REDACTED
    assert redact("ARGS", f"--use={token} now") == f"--use={REDACTED} now"
    assert redact_json({"a": [{"b": f"x {token}"}]}) == {"a": [{"b": f"x {REDACTED}"}]}


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://key:secret@bucket/run", "s3://<redacted>@bucket/run"),
        ("s3://key:se/cr@et@bucket/run", "s3://<redacted>@bucket/run"),
        ("redis://:password@host:6379", "redis://<redacted>@host:6379"),
        ("https://user@host/x", "https://<redacted>@host/x"),
        ("https://host/x?a=1&pw=abc", "https://host/x?a=1&pw=<redacted>"),
        ("https://host/x?sig=abc&page=2", "https://host/x?sig=<redacted>&page=2"),
        ("at s3://a:b@c, 's3://d:e@f'", "at s3://<redacted>@c, 's3://<redacted>@f'"),
    ],
)
def test_users_and_passwords_are_taken_out_of_uris(uri, shown):
    assert redact_text(uri) == shown


def test_all_below_the_name_of_a_secret_is_left_out():
    assert redact_json({"secrets": {"a": ["x", {"b": "y"}]}, "n_tokens": 4096, "none": None}) == {
        "secrets": {"a": [REDACTED, {"b": REDACTED}]},
        "n_tokens": 4096,
        "none": None,
    }


def test_commands_and_what_is_json_in_a_text():
    command = ["run", "--password", "x", "--token", "--lr", "3", "--api-key=a;b c", "DB_PASS=a b"]
    assert redact_json(command) == [
        *("run", "--password", REDACTED, "--token", "--lr", "3"),
        *(f"--api-key={REDACTED}", f"DB_PASS={REDACTED}"),
    ]
    assert redact_json(["--password", 123, "--token", ["x"]]) == [
        "--password",
        REDACTED,
        "--token",
        [REDACTED],
    ]
    assert redact_json(["curl", "-u", "me:x", "-u", "1:2"]) == [
        "curl",
        "-u",
        f"me:{REDACTED}",
        "-u",
        "1:2",
    ]
    assert redact_json([["x-api-key", "x"], (b"Authorization", b"y z"), ["a", "b"]]) == [
        *(["x-api-key", REDACTED], (b"Authorization", REDACTED.encode()), ["a", "b"])
    ]
    assert redact_json({"tokens": 4096, "all": {"tokens": [1, 2]}}) == {
        "tokens": 4096,
        "all": {"tokens": [1, 2]},
    }
    assert redact_json({"tokens": 10**5000, "credentials": {"pins": 1234}}) == {
        "tokens": REDACTED,
        "credentials": {"pins": REDACTED},
    }
    assert redact("TOKENS", "1024") == "1024"
    assert redact_json({"password": ["-x", "y"]}) == {"password": [REDACTED, REDACTED]}
    assert redact_json({"password": 12345, "use_auth": True}) == {
        "password": REDACTED,
        "use_auth": True,
    }
    assert redact("CONFIG", '{"credentials": ["x", {"a": "y"}], "b": 1}') == (
        f'{{"credentials": ["{REDACTED}", {{"a": "{REDACTED}"}}], "b": 1}}'
    )
    assert (
        redact("CONFIG", '{"my password": "x", "b":1}')
        == f'{{"my password": "{REDACTED}", "b": 1}}'
    )
    assert redact("CONFIG", '{"b":1}') == '{"b":1}'
    assert redact_json({"ghp_" + "a1B2" * 9: 1}) == {REDACTED: 1}


@pytest.mark.parametrize(
    "made",
    [
        ReplicaSpec("m:f", {"token": SECRET}, 0, 1, rendezvous_uri=f"s3://a:{SECRET}@b"),
        make_request(1, "m:f", {"x": f"s3://a:{SECRET}@b"}, env={"DB_PASS": SECRET}, run_id="a"),
        Plan("a", ({"command": ["x", "--password", SECRET]},)),
    ],
    ids=lambda made: type(made).__name__,
)
def test_reprs_show_no_secret(made):
    assert SECRET not in repr(made)
    assert repr(made).startswith(type(made).__name__ + "(")


def test_reprs_show_the_rest():
    request = make_request(2, "m:f", {"steps": 3}, run_id="a")
    assert "ranks=(0, 1), world_size=2, entrypoint='m:f', kwargs={'steps': 3}" in repr(request)


def test_a_spec_without_its_secrets():
    kwargs = {"hub": {"token": "t0p"}, "data": "s3://a:b@c", "steps": 3}
    spec = ReplicaSpec("m:f", kwargs, rank=1, world_size=2, rendezvous_uri="s3://u:p@bucket")
    shown = redact_spec(spec)
    assert shown.kwargs == {"hub": {"token": REDACTED}, "data": f"s3://{REDACTED}@c", "steps": 3}
    assert shown.rendezvous_uri == f"s3://{REDACTED}@bucket"
    assert (shown.entrypoint, shown.rank, shown.world_size) == ("m:f", 1, 2)
    assert redact_spec(ReplicaSpec("m:f", {}, 0, 1)).rendezvous_uri is None
    assert json.dumps(spec.kwargs) == json.dumps(kwargs), "the spec itself is as it was"


def test_where_a_secret_is_kept_is_shown_under_one_too():
    volume = {"secret": {"secretName": "hub", "name": "x", "items": [{"key": "k"}]}}
    assert redact_json(volume)["secret"]["secretName"] == "hub"
    assert redact_json({"password": {"name": "hunter22"}})["password"]["name"] == REDACTED


def test_a_spec_whose_names_are_secrets():
    token = "ghp_" + "a1B2" * 9
    spec = ReplicaSpec("m:f", {}, 0, 1, rank_env=token, world_size_env=token)
    shown = redact_spec(spec)
    assert (shown.rank_env, shown.world_size_env) == (REDACTED, REDACTED)
    assert REDACTED in redact_spec(ReplicaSpec(f"m:{token}", {}, 0, 1)).entrypoint


@pytest.mark.parametrize(
    "words",
    [
        ["X-Api-Key:", "hunter2"],
        ["Authorization:", "Bearer", "hunter2"],
        ["curl", "Token:", "hunter2"],
    ],
)
def test_words_behind_the_name_of_a_header(words):
    shown = redact_json(words)
    assert "hunter2" not in str(shown)
    assert len(shown) == len(words)
    assert redact_json(["note:", "nothing", "here"]) == ["note:", "nothing", "here"]
