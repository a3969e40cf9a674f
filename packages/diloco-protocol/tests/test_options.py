"""One dataclass says everything about the options of a backend."""

import inspect
import subprocess
import sys
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import pytest

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import (
    Options,
    check_seconds,
    check_text,
    check_variables,
    details,
    option,
    options_of,
    options_table,
    or_none,
    takes,
)


@dataclass(frozen=True, eq=False, repr=False)
class ToyOptions(Options):
    """The options of a toy.

    Attributes:
        color: Of the toy, such as
            ``"red"``.
        owner: Whoever plays with it.
        grace: Seconds between being asked to end and being ended.
        env: Variables.
        mode: How it moves.
        clock: For tests.

    Raises:
        InvalidRequestError: Not a help: of nothing.
    """

    color: str = field(metadata=details(check=check_text))
    _: KW_ONLY
    owner: "str | None" = option(None, check=or_none(check_text), shown="nobody")
    grace: float = option(10, check=check_seconds)
    env: "dict[str, str] | None" = option(None, check=check_variables, type="variables")
    mode: 'Literal["walk", "run"]' = option("walk")
    clock: "Any" = option(None, hidden=True)


class Toy:
    @takes(ToyOptions)
    def __init__(self, *arguments, **options):
        self.options = ToyOptions(*arguments, **options)


def test_every_field_is_checked_defaults_too():
    options = ToyOptions("red", env={"B": "1", "A": "2"})
    assert (options.color, options.owner, options.mode) == ("red", None, "walk")
    assert repr(options.grace) == "10.0"
    assert list(options.env) == ["A", "B"]
    assert ToyOptions("red").env == {}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"color": ""}, "color must be non-empty text, not ''"),
        ({"owner": " "}, "owner must be non-empty text, not ' '"),
        ({"grace": -1}, "grace must be a number of seconds from 0, not -1"),
    ],
)
def test_a_refusal_names_the_field(values, told):
    with pytest.raises(InvalidRequestError, match=told):
        Toy(**{"color": "red", **values})


def test_the_constructor_has_the_signature():
    parameters = inspect.signature(Toy).parameters
    assert list(parameters) == ["color", "owner", "grace", "env", "mode", "clock"]
    assert parameters["color"].default is inspect.Parameter.empty
    assert parameters["grace"].default == 10
    assert parameters["grace"].kind is inspect.Parameter.KEYWORD_ONLY
    assert next(iter(inspect.signature(Toy.__init__).parameters)) == "self"
    assert Toy.__init__.__doc__.splitlines()[:2] == [
        "Args:",
        '    color: Of the toy, such as `"red"`.',
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "missing 1 required positional argument: 'color'"),
        ({"color": "red", "colour": 1}, "got an unexpected keyword argument 'colour'"),
    ],
)
def test_an_argument_that_there_is_not_is_named(arguments, told):
    with pytest.raises(TypeError, match=told):
        Toy(**arguments)


def test_the_list_of_options():
    assert [(each.name, each.type, each.default, each.help) for each in options_of(ToyOptions)] == [
        ("color", "text", "(required)", 'Of the toy, such as `"red"`.'),
        ("owner", "text", "nobody", "Whoever plays with it."),
        ("grace", "number", "10", "Seconds between being asked to end and being ended."),
        ("env", "variables", "none", "Variables."),
        ("mode", "walk or run", "walk", "How it moves."),
    ]


def test_the_table():
    first, second, third, *_ = options_table(ToyOptions).splitlines()
    assert (first, second) == ("| | type | default | |", "|---|---|---|---|")
    assert third == '| `color` | text | (required) | Of the toy, such as `"red"`. |'


def test_secrets_are_not_shown():
    assert "hunter2" not in repr(ToyOptions("red", env={"TOKEN": "hunter2"}))


@pytest.mark.processes
def test_it_works_where_docstrings_are_removed():
    code = (
        "import sys; sys.path[:] = " + repr(sys.path) + "\n"
        "from dataclasses import dataclass\n"
        "from diloco_protocol.backend import Options, option, options_of, takes\n"
        "@dataclass(frozen=True)\n"
        "class Toys(Options):\n    'Attributes:'\n    a: int = option(1)\n"
        "class Toy:\n    @takes(Toys)\n    def __init__(self, **o): self.o = Toys(**o)\n"
        "print(Toy(a=2).o.a, options_of(Toys)[0].name)"
    )
    done = subprocess.run(
        [sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 a\n"
