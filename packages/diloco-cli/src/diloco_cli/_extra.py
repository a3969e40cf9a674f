"""The verbs of other packages, such as ``export`` and ``plan`` of diloco-core."""

from __future__ import annotations

from typing import Any

import click

from diloco_protocol import MissingDependencyError, Option
from diloco_protocol.backend import Command, get_command, redact_json

from ._exits import SUCCEEDED
from ._facts import Cell
from ._options import REQUIRED, read_value
from ._session import Screen
from ._texts import clean


def find_extra(verb: str) -> Command:
    """Return a verb of an installed package.

    Raises:
        MissingDependencyError: No installed package has it; the error says what to install.
        InvalidRequestError: It cannot be loaded.
    """
    extra = get_command(verb)
    if extra is None:
        raise MissingDependencyError(
            f"`{verb}` needs diloco-core, which is not installed here: pip install diloco-core "
            "(from a checkout: pip install ./packages/diloco-core)"
        )
    return extra


def make_command(verb: str) -> click.Command:
    """Return the verb of an installed package, with the options that the package describes.

    Raises:
        MissingDependencyError: No installed package has it; the error says what to install.
        InvalidRequestError: It cannot be loaded.
    """
    extra = find_extra(verb)
    options = {option.name.lower(): option for option in extra.options()}

    def callback(*, as_json: bool, **given: Any) -> int:
        screen = Screen()
        values = {
            options[name].name: text if isinstance(text, bool) else read_value(options[name], text)
            for name, text in given.items()
            if text is not None
        }
        answer = extra(**values)
        if as_json:
            screen.json({"verb": verb, **redact_json(dict(answer.values))})
        else:
            screen.lines([Cell(clean(line))] for line in answer.lines)
        return SUCCEEDED

    as_json = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")
    parameters = [*map(_parameter, options.values()), as_json]
    return click.Command(verb, params=parameters, callback=callback, help=extra.help)


def _parameter(option: Option) -> click.Parameter:
    name = option.name.lower()
    if option.default == REQUIRED:
        return click.Argument([name])
    flag = f"--{name.replace('_', '-')}"
    if option.type == "bool":
        return click.Option([flag, name], is_flag=True, default=None, help=option.help)
    said = f"{option.help} ({option.type}; default: {option.default})"
    return click.Option([flag, name], metavar="VALUE", help=said)
