"""Secrets in long texts: in time that is linear, and also where the text is cut."""

import json
import tracemalloc

import pytest

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import (
    REDACTED,
    check_whole,
    redact_and_cut,
    redact_json,
    redact_text,
)

NASTY = [
    "x", "a:", "s3://", "://", "eyJ", "eyJ-", "sk-", "-----BEGIN ", "@?a=", "password=",
    "password='", '"k": "', "\\\"", "\\", "--a ", "--a='", "-", "a=", "='", "a: ", "a: b\n",
    "Bearer ", "Basic a", "x-a: ", "Authorization:", "s3://a:", "s3://a:b'", "a:b@", "&a", "?a=&",
    "=", " ", '{"a":', "[", '"--a", ', "'--password', '", "SG.a", "-----BEGIN PRIVATE KEY-----",
    "'--password=", "\"password\": \\\\\"", "a=\"\\", "password=a;b", "https://a:1/@", "a:b:",
    "-a -b", "x-x-", "password:", "<", "token=a,", "('a', '", '"name": "p", "value": ', "é",
    "hooks.slack.com/services/", "a" * 300 + "=", "password=\\", '"password": [', '"password": ["',
    "password={'", "'password': ('\\", '"name": "DB_PASS", "value": ', "name: PASSWORD\n",
    "value: ", 'value="', "value=\"value='", "value=a", 'value="a", name=', "<password>",
    "<token>a", "-u ", "--user a:", "--token\n", "p%61ssword=", "%", "12:30:45", "1:11:11@",
    "Basic aaaa", "token =", "password => ", "token-a:", "a.token: ", "'Authorization: \\",
    "'--password=\\", "\"--token=\\", "'x-a-token: ", "\"Cookie:\\\"", '"name": "p", "type": ',
    "name=a,b=c,", "password:\n  ", "password: |\n ", "password: |\n  a\n", "['password'] = ",
    "<token x", "/u:p", "auth=Bearer ", "token=Basic x,", "value=a,b=c,", 'x "name":"DB_PASS","a":',
    "tokens:\n  1\n", "secret:\n- a\n", "'a: |\n", "secret: [", "auth=Bearer\n", "Auth ",
    "password += ", "password= ", "name: PASSWORD, a: [b, ", "name=password,a={x=[",
    "<token><![CDATA[", "secret: !a &b ", "secret:\n\n", "secret:\\n  ", "\\n", "\\t", "- - ",
    "password:\\\\\\n  a", "name: DB_PASS\\n", "password: a\\", "token -> ", "name: PASSWORD\n- ",
    "name: PASSWORD\n- x\nb: ", 'password:\n- "a\\n', "token=[a", "  ", "auth=Apikey ",
    " password: #:", "- --token\n", "- --token\n- a", "--token, ", "[--token, a1",
    "- - token\n  - ", "[x-a-token, ", "-u\n- a:", "password='''", "('token', '''", "('token', \\'",
    "token=)", "token=" + ")" * 30, "API key", "api key: a1", "token[", "\\u0026", "u0026a",
    "u0026", "----", "---- BEGIN ", "-----BEGIN A-", "---- END ", "PuTTY-User-Key-File-3:",
    "value='a''", "value=''''a", "password='a''", "token='''a''''''", "Cookie:\n a",
    "X-Token: a\n ", "var: DB_PASS\n", "''", "val='a", "variable=token, a='b''", "'--token=a''",
    "value=\"a\"\"", "X-Token:\n a:\n",
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("text", NASTY)
def test_long_texts_take_linear_time(text):
    """Arguments may be a megabyte of one word; quadratic work would take hours."""
    redact_text(text * (20_000 // len(text)))


@pytest.mark.parametrize(
    "around",
    [
        lambda inside: ["password:", inside],
        lambda inside: ["--password", inside],
        lambda inside: ["x", "password:", inside, 2],
        lambda inside: ["password", inside],
        lambda inside: {"name": "password", "value": inside},
    ],
    ids=["header", "option", "header among others", "pair", "value"],
)
def test_nested_lists_and_objects_are_read_once(around):
    """Whatever is read twice at every level takes ages at the 150th."""
    value = "hunter2"
    for _ in range(150):
        value = around(value)
    assert "hunter2" not in str(redact_json(value))
    assert "hunter2" not in redact_text(f"password={json.dumps(value)}")


def test_a_long_list_of_headers_takes_linear_time():
    assert redact_json(["password:"] * 50_000) == ["password:", *[REDACTED] * 49_999]


@pytest.mark.slow
@pytest.mark.parametrize("text", NASTY)
def test_very_long_texts_take_linear_time(text):
    redact_text(text * (8_000_000 // len(text)))


def test_names_are_remembered_only_if_they_are_short():
    tracemalloc.start()
    try:
        for number in range(30):
            assert redact_text(f"{number}{'x' * 50_000}_token=a").endswith(f"_token={REDACTED}")
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "after", "lengths"),
    [
        *(("x https://user:", "@h/y z", 100_000), ("s3://key:se/", "@b", 100_000)),
        *(("//h,redis://:1", "@h", 100_000), ("<password>", "</password>", 100_000)),
        *(("{'value': '", "', 'name': 'DB_PASS'}", 100_000), ("https://", "@h/y z", 100_000)),
        *(("secret:\n- ", "", 100_000), ("-----BEGIN PRIVATE KEY-----\n", "", 100_000)),
    ],
)
@pytest.mark.parametrize("length", [100, 2000, 5000, 20_000, 100_000])
def test_a_secret_is_left_out_of_a_text_that_is_cut_inside_it(length, before, after, lengths):
    length = min(length, lengths)
    text = f"{before}{'hunter2Z' * (length // 8)}{after} {'y' * 100_000}"
    for shown in (redact_and_cut(text, 200), refused(text), refused(text.encode())):
        assert "hunter" not in shown
        assert len(shown) < 300


def test_what_has_no_secret_is_shown_of_a_text_that_is_cut():
    for uri in ("https://host:9000/", "https://host/a:", "x://h/"):
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
