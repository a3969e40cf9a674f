"""Secrets stay out of what is shown."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import InvalidRequestError, Plan, ReplicaSpec, make_request
from diloco_protocol.backend import (
    REDACTED,
    check_whole,
    redact,
    redact_and_cut,
    redact_json,
    redact_spec,
    redact_text,
)


def words_of(text):
    return text.split()


SECRET_NAMES = words_of(
    "HF_TOKEN AWS_SECRET_ACCESS_KEY DB_PASSWORD PGPASSWD PGPASSWORD pgpass "
    "GOOGLE_APPLICATION_CREDENTIALS WANDB_API_KEY apikey ACCESSKEY PRIVATE_KEY DB_PWD Pwd "
    "authorization tokens DB_PASS AUTH BASIC_AUTH WANDB_KEY OPENAI_KEY SSH_KEY STRIPE_KEY "
    "WEBHOOK SLACK_WEBHOOK_URL COOKIE SESSION_COOKIE AccountKey SharedAccessSignature x-api-key "
    "X-Auth-Token accessKeyId AWS_SESSION_TOKEN GITHUB_PAT authToken GITHUBTOKEN client_secret "
    "db.password --password MODAL_TOKEN_ID JWT PASSPHRASE"
)
OTHER_NAMES = words_of(
    "PATH PWD AWS_REGION KEYBOARD keyboard monkey OMP_NUM_THREADS tokenizer TOKENISER "
    "max_tokens n_tokens tokens_per_step token_ids token_count bos_token eos_token_id "
    "KEY_FRAMES keyframe key keys primary_key public_key topologyKey KmsKeyId resource_key "
    "state_dict_keys author AUTHOR authority pathway passenger passive bypass compass "
    "forward_pass secretName secretKeyRef imagePullSecrets TOKEN_TYPE design assign signature "
    "key_value_heads"
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


@pytest.mark.parametrize("value", ["", "None", "null", "true", "False", "0"])
def test_what_nobody_has_to_guess_is_shown(value):
    assert redact("USE_AUTH", value) == value
    assert redact_text(f"auth={value} x") == f"auth={value} x"


SECRET = "hunter2secret"
FORMS = [
    # userinfo, whatever the password holds
    *(f"s3://u:{SECRET}{odd}@b/x" for odd in ("", "\0", "\x1f", "\u2028", "'", '"', "/", "<", ">", " x", "?", "#", "a@")),
    *(f"s3://u:{odd}{SECRET}@b/x" for odd in ("\0", "\x1f", "\u2028", "'", '"', "12/", "<", ">", "x ", "?", "#", "a@")),
    *(f"{scheme}://u:{SECRET}@h/db" for scheme in ("postgresql", "mongodb+srv", "docker", "amqp")),
    *(f"https://{SECRET}@github.com/x", f"redis://:{SECRET}@h:6379", f"s3:/k:{SECRET}@b", f"http:\\/\\/u:{SECRET}@h"),
    *(f"https://h/a,https://u:{SECRET}@h", f"https://proxy/?next=https://u:{SECRET}@h/"),
    *(f"u:{SECRET}@registry.example/img:1", f"image 'u:{SECRET}@registry.example/img' cannot be pulled"),
    # parameters and settings
    *(f"https://x/#access_token={SECRET}", f"https://x/?a=1&access_token={SECRET}&b=2", f"https://x/?v=1&sig={SECRET}"),
    *(f"https://x/?X-Amz-Credential={SECRET}%2F&X-Amz-Signature={SECRET}", f"https://x/?key={SECRET}"),
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET}==;EndpointSuffix=core",
    *(f"SharedAccessSignature=sv=2020&sig={SECRET}", f"Server=x;Uid=sa;Pwd={SECRET};", f"PASSWORD={SECRET},OTHER=x"),
    *(f"host=h password={SECRET} user=u", f"password='{SECRET} x' host=h", f"password = {SECRET} host=h"),
    *(f"jdbc:postgresql://h/db?user=u&password={SECRET}", f"export OPENAI_KEY={SECRET}", f'password="{SECRET}'),
    *(f"password: {SECRET}", f"db:\n  - password: {SECRET}\n  - b: c", f"login with token: {SECRET}9 failed"),
    # commands
    *(f"run --password={SECRET} x", f"run --token {SECRET} --x", f"run --api-key '{SECRET} x' y", f"'--password=a;b {SECRET}'"),
    f"['--password', '{SECRET}']",
    # headers
    *(f"Authorization: {kind} {SECRET}" for kind in ("Bearer", "Basic", 'Digest username="a", response=')),
    *(f"curl -H 'Authorization: Bearer {SECRET}' x", f"Cookie: a=b; c={SECRET}", f"X-Api-Key: {SECRET}", f"bearer {SECRET}"),
    # JSON in text
    *(f'{{"password": "{SECRET}"}}', f"{{'password': '{SECRET}', 'a': 1}}", f'x {{"a": {{"password": "{SECRET}"}}}} y'),
    *(f'{{\\"password\\": \\"{SECRET}\\"}}', f'{{"name": "DB_PASS", "value": "{SECRET}"}}', f"[('password', '{SECRET}')]"),
    *(f'{{"headers": {{"Authorization": "Bearer {SECRET}"}}}}',),
    f"https://hooks.slack.com/services/T0/B0/{SECRET}",
    # within what is no secret
    *(f"cpu='host=db password={SECRET} user=me'", f"{{'cpu': 'x --token {SECRET}'}}", f"--x 'a password={SECRET} b'"),
    *(f"x='password=\"{SECRET}\"'", f"args=['--password={SECRET}']", f"('x', 'password={SECRET}')", f"x: password={SECRET}"),
    *(f'{{"password": "{SECRET} x', f"password='{SECRET} x"),
    *(f"password ={SECRET}", f"password => {SECRET}", f"password := {SECRET}", f"Password : {SECRET}9"),
    *(f"//u:{SECRET}@h/x", f"at '//u:{SECRET}@h'", f"u:{SECRET}@/db", f"https:/u:{SECRET}@h"),
    *(f'run "--password=a;b {SECRET}" x', f"['run', '--password', '{SECRET}', 'x']", f"a: b\npassword: '{SECRET} x'\nc: d"),
    *(f"Private-Token: {SECRET} x", f"with storage-key: {SECRET} x", f"the modal-token-id: {SECRET} x"),
    # lists and objects, and a name beside its value, in JSON and elsewhere
    *(f'{{"password": ["{SECRET}"]}}', f'x {{"password": {{"value": "{SECRET}"}}, "a": 1}} y', f'{{"auth": [{{"a": "{SECRET}'),
    f"{{'password': b'{SECRET}'}}",
    *(f"{{'password': ['x', '{SECRET}']}}", f"Spec(password=['x', '{SECRET}'], a=1)", f"password={{'a': '{SECRET} x'}}"),
    *(f'{{\\"password\\": [\\"{SECRET}\\"]}}', f'{{"password": "]", "token": ["]", "{SECRET}"]}}'),
    *(f'{{"value": "{SECRET}", "name": "DB_PASS"}}', f"value: {SECRET}\n  name: DB_PASS", f"value='{SECRET}', key='DB_PASS'"),
    *(f"- name: DB_PASS\n  value: {SECRET}", f"- name: 'DB_PASS'\n  value: '{SECRET} x'", f"name='DB_PASS', value='{SECRET}'"),
    *(f'{{\\"name\\": \\"DB_PASS\\", \\"value\\": \\"{SECRET}\\"}}', f"<password>{SECRET} x</password>"),
    # more of commands, and names that are written in another way
    *(f"curl -u user:{SECRET} https://h", f"curl --user 'u:{SECRET}' x", f"--proxy-user=u:{SECRET}", f"['-u', 'u:{SECRET}']"),
    *(f"run --token\n{SECRET}\n", f'run --token \\"{SECRET} x\\"', f"https://h/?p%61ssword={SECRET}", f"p%61ssword={SECRET}"),
    # a scheme of authorization is no secret, and the word behind it is
    *(f"{name}={kind} {SECRET}" for name in ("Authorization", "token", "X_AUTH") for kind in ("Bearer", "Token", "basic")),
    *(f"OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer {SECRET}", f"curl -H 'Authorization=Bearer {SECRET}' x"),
    *(f"run --auth Bearer {SECRET}", f"name=AUTH,value=Token {SECRET}", f"HTTP_AUTHORIZATION => Basic {SECRET}=="),
    # settings by a key
    *(f'os.environ["PASSWORD"] = "{SECRET}"', f"env['PASSWORD']={SECRET}", f'config["db"]["password"] = "{SECRET}"'),
    *(f"'password' => '{SECRET}'", f'"password" := {SECRET}', f"$_ENV['password'] = ['{SECRET}'];"),
    # other members between a name and its value
    *(f'{{"Name":"DB_PASSWORD","Type":"x","Value":"{SECRET}"}}', f'{{"value": "{SECRET}", "type": "x", "name": "DB_PASS"}}'),
    *(f'{{"name": "DB_PASSWORD", "description": "of the db", "n": 3, "value": "{SECRET}"}}',),
    *(f"ParameterKey=DbPassword,ParameterValue={SECRET}", f'{{"ParameterKey":"DbPassword","ParameterValue":"{SECRET}"}}'),
    # lines of YAML
    *(f"a: b\n  password: |\n    x\n    {SECRET}\n", f"password: >-\n  {SECRET}", f'"password": |\n  x\n\n  {SECRET}\na: b'),
    *(f"password:\n  {SECRET}", f"- password:\n    '{SECRET} x'"),
    *(f'<password type="x">{SECRET}</password>', f"http://host:8080/login/u:{SECRET}@h", f"ssh://git@h:22/u:{SECRET}@x"),
    # cut off before its second quote
    *(f"run '--password=a;b {SECRET}", f"curl -H 'X-Api-Key: \\\n{SECRET}", f"'--token=a {SECRET}\\"),
]  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_what_has_the_form_of_a_secret_is_left_out(text):
    shown = redact_text(text)
    assert SECRET not in shown
    assert redact_text(shown) == shown
    assert SECRET not in redact("ARGS", text)
    assert SECRET not in str(InvalidRequestError(f"this is refused: {text}"))


def test_what_stands_around_a_secret_is_shown():
    assert redact_text('{"password": {"a": ["x", 5]}, "b": 1}') == (
        f'{{"password": {{"a": ["{REDACTED}", "{REDACTED}"]}}, "b": 1}}'
    )
    assert redact_text("{'password': ['x', (1)], 'b': 1}") == f"{{'password': {REDACTED}, 'b': 1}}"
    assert redact_text('{"secret": {"secretName": "hub"}}') == '{"secret": {"secretName": "hub"}}'
    assert redact_text("curl -u me:x https://h") == f"curl -u me:{REDACTED} https://h"
    assert redact_text('{"value": "x", "name": "lr"}') == '{"value": "x", "name": "lr"}'
    assert redact_text("<token>x</token><b>c</b>") == f"<token>{REDACTED}</token><b>c</b>"
    assert redact_text("a:\n  password: |\n    x\n    y\n  b: c\n") == (
        f"a:\n  password: |\n{REDACTED}\n  b: c\n"
    )
    assert redact_text('os.environ["TOKEN"] = "x y"; z') == f'os.environ["TOKEN"] = "{REDACTED}"; z'
    assert redact_text("auth=Bearer x lr=3") == f"auth={REDACTED} lr=3"
    for quote in "'\"":
        assert redact_text(f"curl -H {quote}Cookie: x{quote} y") == (
            f"curl -H {quote}Cookie: {REDACTED}{quote} y"
        )
    assert redact_text("a:\n  - password: swordfish \n  - b: c") == (
        f"a:\n  - password: {REDACTED} \n  - b: c"
    )
    assert redact_text("run --password=x1 --lr 3") == f"run --password={REDACTED} --lr 3"
    assert redact_text("AccountName=a;AccountKey=x==;B=c") == f"AccountName=a;AccountKey={REDACTED};B=c"  # fmt: skip
    assert redact_text("{'password': 'x', 'a': 1}") == f"{{'password': '{REDACTED}', 'a': 1}}"
    assert redact_text("https://h/?sig=x&a=b#c") == f"https://h/?sig={REDACTED}&a=b#c"


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
    "text",
    ["", "task-0123456789012345678901234567", "hf_model", "s3://bucket/run", "sk-learn", "a@b.org",
     "https://host:9000/path", "https://host/mail?to=a@b", "https://host:9000/mail?to=a@b", "HuggingFaceTB/SmolLM2-135M",
     "python:3.11@sha256:0123", "registry.io:5000/img@sha256:0123", "git@github.com:org/repo", "mailto:a@b.org",
     "secret: not found", "the password is wrong", "secrets['HF_TOKEN'] must be text, not 3", "Basic authentication is needed",
     "bearer of bad news", "12:30:45 12:31", "https://h/?page=2&author=x#part=1", "['password', 'username', 'x']",
     "tokens=1024", "tokens: 123456", "--tokens 12", "n tokens: 1,234.5k", "secrets=3", "rng_key=1a2b3c4d", "hidden_key=3",
     "module.token:train1", "token-ablation-3: 1234567", "job secret-sauce: failed12", "diloco-password-0: 1234567",
     "12:30:45@host", "2026-03-14T12:30:45.123Z@host", "Basic training2 is", "docker run -u 1000:1000 x", "--token\nSee README",
     '{"tokens": [101, 2054]}', '{"tokens":[101,2054]}',
     "secret:\n  secretName: hub", "tokens:\n  - a\n", "name=lr, type=float, value=abc123", "if env['token'] == 3:",
     '{"name": "lr", "type": "x", "value": "abc"}', "a/b:c", "https://host:9000/a:b", "registry.io/team/img:tag@sha256:0123",
     '{"password": []}', "name: lr, value: abc123", "<path>x1</path>", "100%token_count=3",
     "arn:aws:iam::123456789012:role/x", 'User "system:serviceaccount:ns:a" cannot get', "http://127.0.0.1:1234/x and y@z"],
)  # fmt: skip
def test_what_has_no_secret_is_left_as_it_is(text):
    assert redact_text(text) == text


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://key:secret@bucket/run", "s3://<redacted>@bucket/run"),
        ("s3://key:se/cr@et@bucket/run", "s3://<redacted>@bucket/run"),
        ("redis://:password@host:6379", "redis://<redacted>@host:6379"),
        ("https://user@host/x", "https://<redacted>@host/x"),
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
    assert redact_json(["--password", 123, "--token", ["x"]]) == ["--password", REDACTED, "--token", [REDACTED]]  # fmt: skip
    assert redact_json(["curl", "-u", "me:x", "-u", "1:2"]) == ["curl", "-u", f"me:{REDACTED}", "-u", "1:2"]  # fmt: skip
    assert redact_json({"tokens": 4096, "all": {"tokens": [1, 2]}}) == {"tokens": 4096, "all": {"tokens": [1, 2]}}  # fmt: skip
    assert redact_json({"tokens": 10**5000, "credentials": {"pins": 1234}}) == {
        "tokens": REDACTED,
        "credentials": {"pins": REDACTED},
    }
    assert redact("TOKENS", "1024") == "1024"
    assert redact_json({"password": ["-x", "y"]}) == {"password": [REDACTED, REDACTED]}
    assert redact_json({"password": 12345, "use_auth": True}) == {"password": REDACTED, "use_auth": True}  # fmt: skip
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


words = st.sampled_from(
    ["the", "run", "tokenizer", "max_tokens=3", "s3://bucket/run", "a@b.org", "12:30", "(x)", "'y'", '{"a": 1}', "--lr 3", "é"]
)  # fmt: skip


@given(st.lists(words, max_size=8), st.sampled_from(FORMS), st.lists(words, max_size=8))
def test_secrets_among_words(before, form, after):
    shown = redact_text("\n".join([*before, form, *after]))
    assert SECRET not in shown
    assert shown.startswith("\n".join(before))


@given(st.lists(words))
def test_words_are_left_as_they_are(given):
    text = " ".join(given)
    assert redact_text(text) == redact("ARGS", text) == text


pieces = st.sampled_from(
    [*"=:;&@/\\'\"{}[](),<> \n#?-.a1", "://", "password", "token", "sig", "--", REDACTED, "Bearer ", "Authorization: ", "x1"]
)  # fmt: skip


@given(st.lists(pieces, max_size=25).map("".join))
def test_what_has_been_redacted_is_left_as_it_is(text):
    shown = redact_text(text)
    assert redact_text(shown) == shown


def test_a_spec_without_its_secrets():
    kwargs = {"hub": {"token": "t0p"}, "data": "s3://a:b@c", "steps": 3}
    spec = ReplicaSpec("m:f", kwargs, rank=1, world_size=2, rendezvous_uri="s3://u:p@bucket")
    shown = redact_spec(spec)
    assert shown.kwargs == {"hub": {"token": REDACTED}, "data": f"s3://{REDACTED}@c", "steps": 3}
    assert shown.rendezvous_uri == f"s3://{REDACTED}@bucket"
    assert (shown.entrypoint, shown.rank, shown.world_size) == ("m:f", 1, 2)
    assert redact_spec(ReplicaSpec("m:f", {}, 0, 1)).rendezvous_uri is None
    assert json.dumps(spec.kwargs) == json.dumps(kwargs), "the spec itself is as it was"


NASTY = [
    *(
        "x",
        "a:",
        "s3://",
        "://",
        "eyJ",
        "eyJ-",
        "sk-",
        "-----BEGIN ",
        "@?a=",
        "password=",
        "password='",
        '"k": "',
        '\\"',
        "\\",
    ),
    *(
        "--a ",
        "--a='",
        "-",
        "a=",
        "='",
        "a: ",
        "a: b\n",
        "Bearer ",
        "Basic a",
        "x-a: ",
        "Authorization:",
        "s3://a:",
        "s3://a:b'",
    ),
    *(
        "a:b@",
        "&a",
        "?a=&",
        "=",
        " ",
        '{"a":',
        "[",
        '"--a", ',
        "'--password', '",
        "SG.a",
        "-----BEGIN PRIVATE KEY-----",
    ),
    *(
        "'--password=",
        '"password": \\\\"',
        'a="\\',
        "password=a;b",
        "https://a:1/@",
        "a:b:",
        "-a -b",
        "x-x-",
        "password:",
    ),
    *(
        "<",
        "token=a,",
        "('a', '",
        '"name": "p", "value": ',
        "é",
        "hooks.slack.com/services/",
        "a" * 300 + "=",
        "password=\\",
    ),
    *(
        '"password": [',
        '"password": ["',
        "password={'",
        "'password': ('\\",
        '"name": "DB_PASS", "value": ',
        "name: PASSWORD\n",
    ),
    *(
        "value: ",
        'value="',
        "value=\"value='",
        "value=a",
        'value="a", name=',
        "<password>",
        "<token>a",
        "-u ",
        "--user a:",
        "--token\n",
    ),
    *(
        "p%61ssword=",
        "%",
        "12:30:45",
        "1:11:11@",
        "Basic aaaa",
        "token =",
        "password => ",
        "token-a:",
        "a.token: ",
    ),
    *("'Authorization: \\", "'--password=\\", '"--token=\\', "'x-a-token: ", '"Cookie:\\"'),
    *(
        '"name": "p", "type": ',
        "name=a,b=c,",
        "password:\n  ",
        "password: |\n ",
        "password: |\n  a\n",
        "['password'] = ",
    ),
    *(
        "<token x",
        "/u:p",
        "auth=Bearer ",
        "token=Basic x,",
        "value=a,b=c,",
        'x "name":"DB_PASS","a":',
    ),
]


@pytest.mark.parametrize("text", NASTY)
def test_long_texts_take_linear_time(text):
    """Arguments may be a megabyte of one word; what is quadratic would take hours, and the suite would be stopped."""
    redact_text(text * (200_000 // len(text)))


@pytest.mark.slow
@pytest.mark.parametrize("text", NASTY)
def test_very_long_texts_take_linear_time(text):
    redact_text(text * (8_000_000 // len(text)))


def test_names_are_remembered_only_if_they_are_short():
    tracemalloc.start()
    try:
        for number in range(100):
            assert redact_text(f"{number}{'x' * 50_000}_token=a").endswith(f"_token={REDACTED}")
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_where_a_secret_is_kept_is_shown_under_one_too():
    volume = {"secret": {"secretName": "hub", "name": "x", "items": [{"key": "k"}]}}
    assert redact_json(volume)["secret"]["secretName"] == "hub"
    assert redact_json({"password": {"name": "hunter22"}})["password"]["name"] == REDACTED


@pytest.mark.parametrize(
    ("before", "after", "lengths"),
    [
        *(("x https://user:", "@h/y z", 100_000), ("s3://key:se/", "@b", 100_000)),
        *(("//h,redis://:1", "@h", 100_000), ("<password>", "</password>", 5000)),
        ("{'value': '", "', 'name': 'DB_PASS'}", 5000),
    ],
)
@pytest.mark.parametrize("length", [100, 2000, 5000, 20_000, 100_000])
def test_a_secret_is_left_out_of_a_text_that_is_cut_inside_it(length, before, after, lengths):
    length = min(length, lengths)
    text = f"{before}{'hunter2Z' * (length // 8)}{after} {'y' * 500_000}"
    for shown in (redact_and_cut(text, 200), refused(text), refused(text.encode())):
        assert "hunter" not in shown
        assert len(shown) < 300


def test_what_has_no_secret_is_shown_of_a_text_that_is_cut():
    for uri in ("https://host:9000/", "https://host/a:", "x://"):
        assert redact_and_cut(uri + "a" * 100_000, 50) == f"{uri}{'a' * (50 - len(uri))}…"


def refused(value):
    with pytest.raises(InvalidRequestError) as caught:
        check_whole("n", value, 1)
    return str(caught.value)


def test_secrets_are_looked_for_before_a_text_is_cut():
    text = f"{'x' * 480} https://user:hunter2hunter2@host/ {'y' * 10_000}"
    for most in range(470, 520):
        assert "hunter" not in redact_and_cut(text, most)
    assert redact_and_cut("short", 5) == "short"
    assert redact_and_cut("a" * 90_000, 5) == "aaaaa…"
    assert redact_and_cut(f"password='{'a' * 90_000}'", 50) == f"password='{REDACTED}'…"
