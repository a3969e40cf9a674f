"""Secrets are found by the forms that they have in texts, and nothing else is taken for one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import REDACTED, redact, redact_text, shown

SECRET = "hunter2secret"
FORMS = [
    # userinfo, whatever the password holds
    *(f"s3://u:{SECRET}{odd}@b/x"
      for odd in ("", "\0", "\x1f", "\u2028", "'", '"', "/", "<", ">", " x", "?", "#", "a@")),
    *(f"s3://u:{odd}{SECRET}@b/x"
      for odd in ("\0", "\x1f", "\u2028", "'", '"', "12/", "<", ">", "x ", "?", "#", "a@")),
    *(f"{scheme}://u:{SECRET}@h/db" for scheme in ("postgresql", "mongodb+srv", "docker", "amqp")),
    *(f"https://{SECRET}@github.com/x", f"redis://:{SECRET}@h:6379", f"s3:/k:{SECRET}@b",
      f"http:\\/\\/u:{SECRET}@h"),
    *(f"https://h/a,https://u:{SECRET}@h", f"https://proxy/?next=https://u:{SECRET}@h/"),
    *(f"u:{SECRET}@registry.example/img:1",
      f"image 'u:{SECRET}@registry.example/img' cannot be pulled"),
    # parameters and settings
    *(f"https://x/#access_token={SECRET}", f"https://x/?a=1&access_token={SECRET}&b=2",
      f"https://x/?v=1&sig={SECRET}"),
    *(f"https://x/?X-Amz-Credential={SECRET}%2F&X-Amz-Signature={SECRET}",
      f"https://x/?key={SECRET}"),
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET}==;EndpointSuffix=core",
    *(f"SharedAccessSignature=sv=2020&sig={SECRET}", f"Server=x;Uid=sa;Pwd={SECRET};",
      f"PASSWORD={SECRET},OTHER=x"),
    *(f"host=h password={SECRET} user=u", f"password='{SECRET} x' host=h",
      f"password = {SECRET} host=h"),
    *(f"jdbc:postgresql://h/db?user=u&password={SECRET}", f"export OPENAI_KEY={SECRET}",
      f'password="{SECRET}'),
    *(f"password: {SECRET}", f"db:\n  - password: {SECRET}\n  - b: c",
      f"login with token: {SECRET}9 failed"),
    # commands
    *(f"run --password={SECRET} x", f"run --token {SECRET} --x", f"run --api-key '{SECRET} x' y",
      f"'--password=a;b {SECRET}'"),
    f"['--password', '{SECRET}']",
    # headers
    *(f"Authorization: {kind} {SECRET}"
      for kind in ("Bearer", "Basic", 'Digest username="a", response=')),
    *(f"curl -H 'Authorization: Bearer {SECRET}' x", f"Cookie: a=b; c={SECRET}",
      f"X-Api-Key: {SECRET}", f"bearer {SECRET}"),
    # JSON in text
    *(f'{{"password": "{SECRET}"}}', f"{{'password': '{SECRET}', 'a': 1}}",
      f'x {{"a": {{"password": "{SECRET}"}}}} y'),
    *(f'{{\\"password\\": \\"{SECRET}\\"}}', f'{{"name": "DB_PASS", "value": "{SECRET}"}}',
      f"[('password', '{SECRET}')]"),
    *(f'{{"headers": {{"Authorization": "Bearer {SECRET}"}}}}',),
    f"https://hooks.slack.com/services/T0/B0/{SECRET}",
    # letters before quotes, colours, and addresses without a scheme
    *(f"password={begin}'x {SECRET} y'" for begin in ("b", "f", "rb", "$")),
    *(f"--password b'x {SECRET}'", f"['--password', b'x {SECRET}']",
      f'{{"e": "password=b\\"{SECRET}\\""}}'),
    *(f"\x1b[1;33mpassword\x1b[0m=\x1b[32m'x {SECRET}'\x1b[0m", f"\x1b[31mghp_{SECRET * 2}\x1b[0m",
      f"\\x1b[31m--token {SECRET}\\x1b[0m", f"\\u001b[1mAuthorization\\u001b[0m: Basic {SECRET}"),
    *(f"{begin}//u:{SECRET}@h/x" for begin in "[`"),
    # private keys, whole and cut off
    *(
        f"-----BEGIN {kind}-----\nlQ{SECRET}\n{end}"
        for kind in ("PGP " + "PRIVATE KEY BLOCK", "RSA2048 " + "PRIVATE KEY",
                     "ML-DSA-65 " + "PRIVATE KEY")
        for end in ("", f"-----END {kind}-----")
    ),
    *(f"---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\n{SECRET}\n{end}"
      for end in ("", "---- END SSH2 ENCRYPTED PRIVATE KEY ----")),
    *(f"PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 1\n{SECRET}\n{end}"
      for end in ("", "Private-MAC: abcd")),
    # within what is no secret
    *(f"cpu='host=db password={SECRET} user=me'", f"{{'cpu': 'x --token {SECRET}'}}",
      f"--x 'a password={SECRET} b'"),
    *(f"x='password=\"{SECRET}\"'", f"args=['--password={SECRET}']", f"('x', 'password={SECRET}')",
      f"x: password={SECRET}"),
    *(f'{{"password": "{SECRET} x', f"password='{SECRET} x"),
    *(f"password ={SECRET}", f"password => {SECRET}", f"password := {SECRET}",
      f"Password : {SECRET}9"),
    *(f"//u:{SECRET}@h/x", f"at '//u:{SECRET}@h'", f"u:{SECRET}@/db", f"https:/u:{SECRET}@h"),
    *(f'run "--password=a;b {SECRET}" x', f"['run', '--password', '{SECRET}', 'x']",
      f"a: b\npassword: '{SECRET} x'\nc: d"),
    *(f"Private-Token: {SECRET} x", f"with storage-key: {SECRET} x",
      f"the modal-token-id: {SECRET} x"),
    # lists and objects, and a name beside its value, in JSON and elsewhere
    *(f'{{"password": ["{SECRET}"]}}', f'x {{"password": {{"value": "{SECRET}"}}, "a": 1}} y',
      f'{{"auth": [{{"a": "{SECRET}'),
    f"{{'password': b'{SECRET}'}}",
    *(f"{{'password': ['x', '{SECRET}']}}", f"Spec(password=['x', '{SECRET}'], a=1)",
      f"password={{'a': '{SECRET} x'}}"),
    f'{{\\"password\\": [\\"{SECRET}\\"]}}',
    *(f'{{"value": "{SECRET}", "name": "DB_PASS"}}', f"value: {SECRET}\n  name: DB_PASS",
      f"value='{SECRET}', key='DB_PASS'"),
    *(f"- name: DB_PASS\n  value: {SECRET}", f"- name: 'DB_PASS'\n  value: '{SECRET} x'",
      f"name='DB_PASS', value='{SECRET}'"),
    *(f'{{\\"name\\": \\"DB_PASS\\", \\"value\\": \\"{SECRET}\\"}}',
      f"<password>{SECRET} x</password>"),
    # more of commands, and names that are written in another way
    *(f"curl -u user:{SECRET} https://h", f"curl --user 'u:{SECRET}' x", f"--proxy-user=u:{SECRET}",
      f"['-u', 'u:{SECRET}']"),
    *(f"run --token\n{SECRET}\n", f'run --token \\"{SECRET} x\\"',
      f"https://h/?p%61ssword={SECRET}", f"p%61ssword={SECRET}"),
    # a scheme of authorization is no secret, and the word behind it is
    *(f"{name}={kind} {SECRET}" for name in ("Authorization", "token", "X_AUTH")
      for kind in ("Bearer", "Token", "basic")),
    *(f"OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer {SECRET}",
      f"curl -H 'Authorization=Bearer {SECRET}' x"),
    *(f"run --auth Bearer {SECRET}", f"name=AUTH,value=Token {SECRET}",
      f"HTTP_AUTHORIZATION => Basic {SECRET}=="),
    # settings by a key
    *(f'os.environ["PASSWORD"] = "{SECRET}"', f"env['PASSWORD']={SECRET}",
      f'config["db"]["password"] = "{SECRET}"'),
    *(f"'password' => '{SECRET}'", f'"password" := {SECRET}', f"$_ENV['password'] = ['{SECRET}'];"),
    # other members between a name and its value
    *(f'{{"Name":"DB_PASSWORD","Type":"x","Value":"{SECRET}"}}',
      f'{{"value": "{SECRET}", "type": "x", "name": "DB_PASS"}}'),
    *(f'{{"name": "DB_PASSWORD", "description": "of the db", "n": 3, "value": "{SECRET}"}}',),
    *(f"ParameterKey=DbPassword,ParameterValue={SECRET}",
      f'{{"ParameterKey":"DbPassword","ParameterValue":"{SECRET}"}}'),
    # lines of YAML
    *(f"a: b\n  password: |\n    x\n    {SECRET}\n", f"password: >-\n  {SECRET}",
      f'"password": |\n  x\n\n  {SECRET}\na: b'),
    *(f"password:\n  {SECRET}", f"- password:\n    '{SECRET} x'"),
    *(f'<password type="x">{SECRET}</password>', f"http://host:8080/login/u:{SECRET}@h",
      f"ssh://git@h:22/u:{SECRET}@x"),
    # cut off before its second quote
    *(f"run '--password=a;b {SECRET}", f"curl -H 'X-Api-Key: \\\n{SECRET}",
      f"'--token=a {SECRET}\\"),
    # other schemes of authorization, and a tab or the end of a line behind one
    *(f"Authorization={kind} {SECRET}"
      for kind in ("ApiKey", "Negotiate", "NTLM", "shared-key", "Made-Up")),
    *(f"auth=Bearer\t{SECRET}", f"auth=Bearer\n{SECRET}", f"Authorization=Bearer\r\n {SECRET}"),
    # other signs between a name and a value
    *(f"DB_PASSWORD+={SECRET}", f"DB_PASSWORD ?= {SECRET}", f"DB_PASSWORD=={SECRET}",
      f"DB_PASSWORD -> {SECRET}"),
    *(f"DB_PASSWORD= {SECRET}", f"--password=  '{SECRET} x'", f"password\xa0=\xa0{SECRET}",
      f"user[password]={SECRET}"),
    *(f"run --password \\\n  {SECRET} \\\n  x", f"Authorization=  Bearer   {SECRET}"),
    # lists and mappings of YAML, in one line and below
    *(f'secret: {{"x": "{SECRET}"}}', f"tokens: [a, {SECRET}]", f"tokens=[a, {SECRET}]",
      f"env: {{DB_PASSWORD: {SECRET}}}"),
    *(f"password: !!str {SECRET}", f"password: &a {SECRET}", f"{{password: '{SECRET} x', a: b}}"),
    *(f"password: '{SECRET} x' # of the db", f"password: # of the db\n\n  {SECRET}\n",
      f"password:\n- {SECRET}"),
    *(f"passwords:\n  a: {SECRET}", f"secret:\n  a: x\n  b: {SECRET}\n",
      f"secret:\n  a:\n  - b: {SECRET} x"),
    *(f"x:\n  tokens:\n  - {SECRET}", f"tokens:\n  - [a,\n     {SECRET}]",
      f"secret:\n  secretName: hub\n  value: {SECRET}"),
    *(f"password: !!str |\n  {SECRET}", f"password: |\r\n  {SECRET}\r\n"),
    *(f"secret: {{a: {{b: {{c: {SECRET}}}}}}}", f"https://h/?a=b\\u0026sig={SECRET}",
      f"login, password: a={SECRET} x"),
    # lists and objects between a name and its value
    (
        f'{{"name": "DB_PASSWORD", "valueFrom": {{"ref": {{"name": "a", "key": "b"}}}}, "value": '
        f'"{SECRET}"}}'
    ),
    f'{{"value": "{SECRET}", "from": {{"a": [1]}}, "name": "PGPASS"}}',
    *(f'{{"Name": "PGPASS", "Type": {{"a": 1}}, "Value": "{SECRET}"}}',
      f"{{'Name': 'PGPASS', 'n': [1], 'Value': '{SECRET}'}}"),
    f'{{"name": "PGPASS", "of": "a, b: c", "value": "{SECRET}"}}',
    f'{{"name": "lr", "env": [{{"name": "DB_PASS", "value": "{SECRET}"}}], "value": 3}}',
    *(f"name: PGPASS\na:\n- x\n- y\nvalue: {SECRET}", f"name=PGPASS type=a value={SECRET}"),
    *(f"name: PGPASS\na: q'q\nvalue: {SECRET}", f"{{api_key: [null, [{SECRET}, x]], b: [1]}}"),
    # items of lists, in YAML and in brackets
    *(f"args:\n- --token\n- {SECRET}\n- x", f"args: [--token, {SECRET}]",
      f"{{cmd: [--token, {SECRET}, --lr, 3]}}"),
    *(f'  - "--token"\n  - "{SECRET} x"', f"args:\r\n- --token\r\n- {SECRET}",
      f"- --auth\n- Bearer {SECRET}\n"),
    *(f"- curl\n- -u\n- me:{SECRET}", f"[-u, 'me:{SECRET}']", f"[-u, me:{SECRET}, x]",
      f'- "-u"\n- "me:{SECRET}"'),
    *(f"headers:\n- - x-api-key\n  - {SECRET}", f"-   - Authorization\n    - Foo {SECRET}",
      f'- - "token"\n  - "{SECRET}"'),
    *(f"{{headers: [[x-api-key, {SECRET}]]}}", f"[[Authorization, Foo {SECRET}]]"),
    f'[\n      "x-api-key",\n      "{SECRET}"\n    ]',
    *(f"[(b'x-api-key', b'{SECRET}')]", f"Headers([(b'authorization', b'{SECRET} x')])",
      f'"--password" "{SECRET} x"'),
    # other quotes, indices, and names of two words
    *(f'password = """{SECRET}"""', f"password='''\n{SECRET}\n'''",
      f"--set auth.passwords[0]={SECRET}", f"password[]={SECRET}"),
    *(f"API key: {SECRET}", f"the Secret Key: '{SECRET}'", f"Account Key={SECRET};x=y",
      f"storage key = {SECRET}"),
    *(f"Server=h;UID=u;PWD={SECRET};", f"DB_PASS_PROD={SECRET}", f"https://h/?a=b&pw={SECRET}"),
    # XML
    *(f"<db:password>{SECRET}</db:password>", f"<password>\n  <![CDATA[{SECRET}]]></password>"),
    # headers that go on in another line
    *(f"Authorization: Bearer\r\n {SECRET}", f"X-Api-Key:\n\t{SECRET}"),
    *(f"a: b\r\nCookie: a=b;\r\n  c=d;\r\n  e={SECRET} x\r\nf: g",),
    # other names of the two members of a pair
    *(f'{{"variable": "DB_PASSWORD", "val": "{SECRET}"}}', f"- var: DB_PASSWORD\n  val: {SECRET}"),
    *(f"env_name=PGPASS, value='{SECRET}'", f"'Cookie: it''s {SECRET} x'",
      f"- --token\n- 'it''s {SECRET} x'"),
    *(f'{{"VARIABLE": "PGPASS", "a": 1, "VALUE": "{SECRET}"}}',
      f"{{'val': '{SECRET}', 'varName': 'PGPASS'}}"),
    *(f'{{"variable_name": "PGPASS", "variable_value": "{SECRET}"}}',
      f'{{"envKey": "PGPASS", "envVal": "{SECRET}"}}'),
    # quotes that are doubled inside
    *(f"password: 'it''s {SECRET} x'", f"password: '{SECRET}'''", f"'--password=it''s {SECRET}'",
      f"password: '''{SECRET} x'"),
    *(f'password="say ""{SECRET}"" x"',
      f"- name: PGPASS\n  a: 'it''s'\n  value: 'it''s {SECRET} x'"),
    *(f"('token', 'a''{SECRET}')", f"'--token=x''y {SECRET}'"),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("text", FORMS)
def test_what_has_the_form_of_a_secret_is_left_out(text):
    told = redact_text(text)
    assert SECRET not in told
    assert redact_text(told) == told
    assert SECRET not in redact("ARGS", text)
    for value in (text, text.encode(), {"a": [text]}, {"a": (text.encode(),)}):
        assert SECRET not in shown(value)
    assert SECRET not in str(InvalidRequestError(f"this is refused: {text}"))
    for quoted in (repr(text), json.dumps(text), repr(repr(text)), json.dumps(json.dumps([text]))):
        assert SECRET not in str(InvalidRequestError(f"{quoted} is refused, and more"))


def test_what_stands_around_a_secret_is_shown():
    assert redact_text('{"password": {"a": ["x", 5]}, "b": 1}') == (
        f'{{"password": {{"a": ["{REDACTED}", "{REDACTED}"]}}, "b": 1}}'
    )
    assert redact_text("{'password': ['x', (1)], 'b': 1}") == f"{{'password': {REDACTED}, 'b': 1}}"
    assert redact_text('{"secret": {"secretName": "hub"}}') == '{"secret": {"secretName": "hub"}}'
    assert redact_text('{"password": "]", "token": ["]", "x"]}') == (
        f'{{"password": "{REDACTED}", "token": ["{REDACTED}", "{REDACTED}"]}}'
    )
    assert redact_text("curl -u me:x https://h") == f"curl -u me:{REDACTED} https://h"
    assert redact_text('{"value": "x", "name": "lr"}') == '{"value": "x", "name": "lr"}'
    assert redact_text("<token>x</token><b>c</b>") == f"<token>{REDACTED}</token><b>c</b>"
    assert redact_text("a:\n  password: |\n    x\n    y\n  b: c\n") == (
        f"a:\n  password: |\n    {REDACTED}\n    {REDACTED}\n  b: c\n"
    )
    assert redact_text("- auth:\n  - a: x\n    tokenName: b\n\n  - y\n  c: d") == (
        f"- auth:\n  - a: {REDACTED}\n    tokenName: b\n\n  - {REDACTED}\n  c: d"
    )
    assert (
        redact_text('"password":\n  "a": "x\\ny"\nb: c') == f'"password":\n  "a": {REDACTED}\nb: c'
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
    assert (
        redact_text("AccountName=a;AccountKey=x==;B=c")
        == f"AccountName=a;AccountKey={REDACTED};B=c"
    )
    assert redact_text("{'password': 'x', 'a': 1}") == f"{{'password': '{REDACTED}', 'a': 1}}"
    assert redact_text("foo(a=[1], token=x1)") == f"foo(a=[1], token={REDACTED})"
    assert redact_text("{x: {token: a(b)c12}}") == f"{{x: {{token: {REDACTED}}}}}"
    assert redact_text("[--token, x1, --lr, 3] y") == f"[--token, {REDACTED}, --lr, 3] y"
    assert redact_text("- -u\n- me:x\n- y") == f"- -u\n- me:{REDACTED}\n- y"
    assert redact_text("  Cookie: a;\n   b\n  Host: c\nd") == f"  Cookie: {REDACTED}\n  Host: c\nd"
    assert redact_text("password: 'it''s', b: 'c'") == f"password: '{REDACTED}', b: 'c'"
    assert redact_text("https://h/?sig=x&a=b#c") == f"https://h/?sig={REDACTED}&a=b#c"


@pytest.mark.sampled
@pytest.mark.parametrize(
    "text",
    ["", "task-0123456789012345678901234567", "hf_model", "s3://bucket/run", "sk-learn", "a@b.org",
     "https://host:9000/path", "https://host/mail?to=a@b", "https://host:9000/mail?to=a@b",
     "HuggingFaceTB/SmolLM2-135M", "python:3.11@sha256:0123", "registry.io:5000/img@sha256:0123",
     "git@github.com:org/repo", "mailto:a@b.org", "secret: not found", "the password is wrong",
     "secrets['HF_TOKEN'] must be text, not 3", "Basic authentication is needed",
     "bearer of bad news", "12:30:45 12:31", "https://h/?page=2&author=x#part=1",
     "['password', 'username', 'x']", "tokens=1024", "tokens: 123456", "--tokens 12",
     "n tokens: 1,234.5k", "secrets=3", "rng_key=1a2b3c4d", "hidden_key=3", "module.token:train1",
     "token-ablation-3: 1234567", "job secret-sauce: failed12", "diloco-password-0: 1234567",
     "12:30:45@host", "2026-03-14T12:30:45.123Z@host", "Basic training2 is",
     "docker run -u 1000:1000 x", "--token\nSee README", '{"tokens": [101, 2054]}',
     '{"tokens":[101,2054]}', "secret:\n  secretName: hub", "tokens:\n  - 12\n",
     "name=lr, type=float, value=abc123", "if env['token'] == 3:",
     '{"name": "lr", "type": "x", "value": "abc"}', "a/b:c", "https://host:9000/a:b",
     "registry.io/team/img:tag@sha256:0123", '{"password": []}', "name: lr, value: abc123",
     "<path>x1</path>", "100%token_count=3", "arn:aws:iam::123456789012:role/x",
     'User "system:serviceaccount:ns:a" cannot get', "http://127.0.0.1:1234/x and y@z",
     "the token budget", "tokens: 512", "tokens: [1, 2]", "tokens: {}", "sync_every: 5",
     "n_tokens += 12", "max_tokens:\n- 12", "secret_name=my-secret", "secretName: my-secret",
     "tokens:\n- 12\n- 13\na: b", "secret:\n  the name of a secret", "PASSWORD= is not set",
     "password= host=db1.example", "if token == 3", "auth=", "the auth: Basic is used",
     "secret: (optional) its name",
     "volumes:\n- name: hub\n  secret:\n    secretName: hub\ncontainers: []",
     "pytorch/pytorch:2.4.0-cuda12.1", "/home/me/token/x1.py",
     "the following have no token:\n- rank 0", "token:\nrank 0", "key: |\n  a", "x -> token1",
     "foo(user='u', token=None)", "foo(token=None): no", "[f(token=)]",
     "use --token, then --lr, or neither", "- --token\n- --lr", "- --token\n- the token of a hub",
     "secret key: not found", "- - tokens\n  - 12", "the '--token' is unknown",
     "[batch-size, token]", "tokens[0]=12", "-u, --user name"],
)  # fmt: skip
def test_what_has_no_secret_is_left_as_it_is(text):
    assert redact_text(text) == text


words = st.sampled_from(
    ["the", "run", "tokenizer", "max_tokens=3", "s3://bucket/run", "a@b.org", "12:30", "(x)", "'y'",
     '{"a": 1}', "--lr 3", "é"]
)  # fmt: skip


@given(st.lists(words, max_size=8), st.sampled_from(FORMS), st.lists(words, max_size=8))
def test_secrets_among_words(before, form, after):
    told = redact_text("\n".join([*before, form, *after]))
    assert SECRET not in told
    assert told.startswith("\n".join(before))


@given(st.lists(words))
def test_words_are_left_as_they_are(given):
    text = " ".join(given)
    assert redact_text(text) == redact("ARGS", text) == text


pieces = st.sampled_from(
    [*"=:;&@/\\'\"{}[](),<> \n#?-.a1", "://", "password", "token", "sig", "--", REDACTED, "Bearer ",
     "Authorization: ", "x1"]
)  # fmt: skip


@given(st.lists(pieces, max_size=25).map("".join))
def test_what_has_been_redacted_is_left_as_it_is(text):
    told = redact_text(text)
    assert redact_text(told) == told
