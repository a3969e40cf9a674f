"""Verbs that other packages supply."""

import json
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import pytest
from click.testing import CliRunner

from diloco_cli import _app, _installed
from diloco_protocol import InvalidRequestError, MissingDependencyError
from diloco_protocol.backend import Answer, Options, check_whole, command, details, option


@dataclass(frozen=True, eq=False, repr=False)
class Greeting(Options):
    """Options.

    Attributes:
        name: Whom to greet.
        much_louder: Whether to shout.
        times: How often.
        client: An object.
    """

    name: str = field(metadata=details())
    _: KW_ONLY
    much_louder: bool = option(False)
    times: int = option(1, check=lambda name, value: check_whole(name, value, 1, 3))
    client: Any = option(None, type="client")


@command(Greeting)
def greet(options):
    """Greet somebody."""
    text = (options.name.upper() if options.much_louder else options.name) * options.times
    return Answer({"greeting": text, "password": "hunter2"}, (f"hello {text}",))


@pytest.fixture
def diloco(monkeypatch):
    monkeypatch.setattr(_installed, "get_command", lambda name: greet)

    def run(*arguments):
        return CliRunner().invoke(_app.cli, ["plan", *arguments], standalone_mode=False)

    return run


def test_options_without_a_default_are_arguments_and_others_have_names(diloco):
    assert diloco("you").stdout == "hello you\n"
    assert diloco("you", "--much-louder", "--times", "2").stdout == "hello YOUYOU\n"
    assert diloco("you\x1b[2J").stdout == "hello you\\x1b[2J\n"


def test_json_has_no_secrets(diloco):
    printed = json.loads(diloco("you", "--json").stdout)
    expected = {"version": 1, "verb": "plan", "greeting": "you", "password": "<redacted>"}
    assert printed == expected


def test_help_is_what_the_package_says(diloco):
    text = " ".join(diloco("--help").output.split())
    assert "Greet somebody." in text
    assert "--times VALUE How often. (whole number; default: 1)" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["you", "--times", "many"], "times='many' is not allowed"),
        (["you", "--times", "4"], "times must be a whole number from 1 to 3"),
        (["you", "--client", "x"], r"client \(client\) cannot be given"),
    ],
)
def test_what_is_refused(diloco, arguments, told):
    error = diloco(*arguments).exception
    assert isinstance(error, InvalidRequestError)
    with pytest.raises(InvalidRequestError, match=told):
        raise error


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_installed, "get_command", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"`export` needs .*pip install diloco-core"):
        _installed.make_command("export")
