"""The options of a backend's constructor, declared in one place.

A backend has one frozen dataclass, derived from :class:`Options`. Its fields are the arguments of
the constructor. Their names, types and defaults form the signature, the docstring describes them,
and each field may have a check. ``options()`` and the table of the README are made from it::

    @dataclass(frozen=True, eq=False, repr=False)
    class ToyOptions(Options):
        \"\"\"The options of a toy.

        Attributes:
            color: The color of the toy.
            grace: Seconds between being asked to end and being ended.
        \"\"\"

        color: str = field(metadata=details(check=check_text))
        _: KW_ONLY
        grace: float = option(10.0, check=check_seconds)


    class ToyExecutor(BaseExecutor):
        options_class = ToyOptions

        @takes(ToyOptions)
        def __init__(self, *arguments, **options):
            self._options = ToyOptions(*arguments, **options)
            super().__init__(**self._options.of_base(Backoff(first=1.0, cap=20.0)))
"""  # noqa: D214 - the section is that of a docstring in the example

from __future__ import annotations

import inspect
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Concatenate, ParamSpec, TypeVar

from ._backoff import Backoff
from ._checks import check_names, check_seconds, check_whole, shown
from ._errors import InvalidRequestError
from ._hooks import Option
from ._journal import RunJournal
from ._redact import redact_text
from ._spec import LONGEST

P = ParamSpec("P")
T = TypeVar("T")
Check = Callable[[str, Any], Any]

_WORDS = {
    "Any": "any",
    "Iterable[str | os.PathLike[str]]": "list of paths",
    "Mapping[str, Any]": "mapping",
    "Mapping[str, str]": "mapping of text to text",
    "Sequence[Mapping[str, Any]]": "list of mappings",
    "Sequence[str]": "list of text",
    "bool | Iterable[str]": "True, False or list of text",
    "float": "number",
    "int": "whole number",
    "str": "text",
    "str | os.PathLike[str]": "path",
}


@dataclass(frozen=True, eq=False, repr=False)
class Options:
    """Base class of the options of a backend.

    When an instance is made, every field that has a check is checked. A None that is the field's
    default is allowed, whatever the check says. Subclasses do not have a generated ``repr``, since
    an ``env`` may hold secrets.

    Raises:
        InvalidRequestError: A value is not allowed; the error says what was given and what is
            allowed.
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            check, value = item.metadata.get("check"), getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, check(item.name, value) if check else value)
            except InvalidRequestError:
                if value is not None or item.default is not None:
                    raise

    def of_base(self, backoff: Backoff) -> dict[str, Any]:
        """Return those options that the constructor of ``BaseExecutor`` takes.

        Args:
            backoff: The delays, if the option ``backoff`` does not say.
        """
        names = {name: name for name in ("run_id", "journal", "env", "max_restarts")}
        names["patience"] = "retry_timeout"
        taken = {
            name: getattr(self, option) for name, option in names.items() if hasattr(self, option)
        }
        return {**taken, "backoff": getattr(self, "backoff", None) or backoff}


def details(
    *,
    check: Check | None = None,
    type: str | None = None,  # noqa: A002 - as in Option
    shown: str | None = None,
    hidden: bool = False,
) -> dict[str, Any]:
    """Return the metadata of a field of :class:`Options`.

    Args:
        check: Called with the field's name and its value, even if that is the default; returns the
            value to keep, or raises.
        type: The type in words, if the annotation does not say enough.
        shown: The default in words, if the value itself does not say enough.
        hidden: Whether the field is left out of ``options()`` and the README, because only tests
            need it.
    """
    return {"check": check, "type": type, "shown": shown, "hidden": hidden}


def option(default: T, **metadata: Any) -> T:
    """Make a field of :class:`Options` that has a default; :func:`details` has the other arguments.

    A field without a default is written ``field(metadata=details(...))``, so that type checkers see
    that it has none.
    """
    value: T = field(default=default, metadata=details(**metadata))
    return value


def check_journal(name: str, value: object) -> object:
    """Check for a :class:`RunJournal`, or None.

    Raises:
        InvalidRequestError: The value is something else; the error names the methods of a journal.
    """
    methods = [method for method in vars(RunJournal) if not method.startswith("_")]
    lacks = [method for method in methods if not callable(getattr(value, method, None))]
    if value is not None and (lacks or isinstance(value, type)):
        raise InvalidRequestError(
            f"{name} must be a RunJournal or None, not {shown(value)}: a journal has the methods "
            f"{', '.join(methods)}"
        )
    return value


def check_backoff(name: str, value: object) -> Backoff | None:
    """Check for a :class:`Backoff`, or None.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if value is not None and not isinstance(value, Backoff):
        raise InvalidRequestError(f"{name} must be a Backoff or None, not {shown(value)}")
    return value


def takes(
    options: Callable[P, Options],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the signature of a class of options.

    Type checkers, editors and ``inspect`` see that signature.

    Args:
        options: The class of options. The constructor itself takes ``*arguments`` and ``**options``
            and passes them to that class.
    """

    def decorate(constructor: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        taken = inspect.signature(options)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [first, *taken.parameters.values()]
        constructor.__signature__ = taken.replace(  # type: ignore[attr-defined]
            parameters=parameters, return_annotation=None
        )
        helps = _helps(options)
        constructor.__doc__ = "Args:\n" + "\n".join(
            f"    {name}: {text}" for name, text in helps.items()
        )
        return constructor

    return decorate


def options_of(options: type[Options]) -> list[Option]:
    """Return the options of a class in order, for a page of help; hidden ones are left out."""
    helps = _helps(options)
    return [
        Option(
            item.name,
            item.metadata.get("type") or _type_in_words(item.type),
            item.metadata.get("shown") or _default_in_words(item),
            helps.get(item.name, ""),
        )
        for item in fields(options)
        if not item.metadata.get("hidden")
    ]


def options_table(options: type[Options]) -> str:
    """Return the options of a class as a table in Markdown, as a README has it."""
    rows = [
        f"| `{row.name}` | {row.type} | {row.default} | {row.help} |" for row in options_of(options)
    ]
    return "\n".join(["| | type | default | |", "|---|---|---|---|", *rows])


def _helps(options: object) -> dict[str, str]:
    """Return the text that the section "Attributes" of a docstring has for each name.

    It is empty if Python has removed the docstrings.
    """
    _, _, section = (inspect.getdoc(options) or "").partition("\nAttributes:\n")
    section, _, _ = section.partition("\n\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.replace("``", "`").split()) for name, text in entries}


def _type_in_words(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    name = text.removesuffix(" | None")
    choices = re.findall(r"[\"']([^\"']*)[\"']", name) if name.startswith("Literal[") else []
    return " or ".join(choices) or _WORDS.get(name, name)


def _default_in_words(item: Field[Any]) -> str:
    value = item.default
    if value is MISSING:
        return "(required)"
    if value is None:
        return "none"
    return f"{value:g}" if type(value) is float else str(value)


RUNNER = ("python", "-m", "diloco_protocol.runner")
"""The command that starts the runner, if the options do not say."""


def text_like(
    pattern: str, allowed: str, show: Callable[[object, str], str] = shown
) -> Callable[[str, object], str]:
    """Return a check for text of a form.

    Args:
        pattern: What the whole text must match.
        allowed: The form in words, for the error.
        show: Returns the value as the error may show it; called with the value and its name.
    """
    form = re.compile(pattern)

    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or not form.fullmatch(value):
            raise InvalidRequestError(f"{name} must be {allowed}, not {show(value, name)}")
        return value

    return check


def one_of(*choices: str) -> Callable[[str, object], str]:
    """Return a check for one of some texts."""
    return text_like("|".join(map(re.escape, choices)), f"one of {', '.join(choices)}")


def whole(least: int, most: int) -> Callable[[str, object], int]:
    """Return a check for a whole number in a range."""
    return lambda name, value: check_whole(name, value, least, most)


def seconds(most: float = math.inf, *, positive: bool = False) -> Callable[[str, object], float]:
    """Return a check for a number of seconds."""
    return lambda name, value: check_seconds(name, value, most=most, positive=positive)


def check_flag(name: str, value: object) -> bool:
    """Check for True or False.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be True or False, not {shown(value)}")
    return value


def check_command(name: str, value: object) -> tuple[str, ...]:
    """Check for the words of the command that starts the runner; None stands for :data:`RUNNER`.

    Raises:
        InvalidRequestError: The value is something else, such as one text, or has a word that no
            system can start a program with.
    """
    if value is None:
        return RUNNER
    if isinstance(value, str):
        text = redact_text(value)
        try:
            split = shlex.split(text)
        except ValueError:  # a closing quote is missing
            split = text.split()
        raise InvalidRequestError(f"{name} must be a list of words, not text: write {shown(split)}")
    words = check_names(name, value)
    if not words:
        raise InvalidRequestError(f"{name} must be a list of words, not an empty one")
    for number, word in enumerate(words):
        if "\0" in word or len(word.encode()) > LONGEST:
            raise InvalidRequestError(
                f"{name}[{number}] contains a NUL character, or has more than {LONGEST} bytes: "
                "no system can start a program with that"
            )
    return words
