"""Choose backends, read their options from text, and search for a run in all of them."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

from diloco_protocol import (
    BaseExecutor,
    FolderJournal,
    InvalidRequestError,
    Option,
    ReplicaHandle,
    ReplicaNotFoundError,
    UnavailableError,
    get_executor,
)
from diloco_protocol.backend import is_run_id, redact, shown

from ._facts import place_of, replica_facts
from ._texts import clean

T = TypeVar("T")

VARIABLE = "DILOCO_OPTIONS"
REQUIRED = "(required)"
_IN_JSON = (
    "mapping", "mapping of text to text", "list of mappings", "name to label to values",
    "part of a request", "pod template",
)  # fmt: skip
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class Choice:
    """The backends that a verb may use, and the text of the options that were given.

    Attributes:
        backend: The one that was named; None for all that are installed.
        names: The names of the backends that may be used.
        options: Text by option, by backend.
        given: The options as they were typed, to type them again.
    """

    backend: str | None
    names: tuple[str, ...]
    options: Mapping[str, Mapping[str, str]]
    given: tuple[str, ...]

    def again(self, verb: str, run: str, backend: str | None, more: Sequence[str] = ()) -> str:
        """Return the command that does something with the same run; secrets are left out."""
        words = ["diloco", verb, run, *more, *(["--backend", backend] if backend else [])]
        for text in self.given:
            name, _, value = text.partition("=")
            words += ["--option", f"{name}={redact(name.rpartition('.')[2], value)}"]
        return shlex.join(words)


def read_choice(
    backend: str | None, given: Sequence[str], environ: Mapping[str, str], installed: Sequence[str]
) -> Choice:
    """Read ``--backend``, ``--option`` and the variable ``DILOCO_OPTIONS``.

    The variable has options of any backends, separated by blanks; those that are typed take
    precedence.

    Raises:
        InvalidRequestError: This backend is not installed, or a text does not say which option of
            which backend it is.
    """
    listed = ", ".join(installed) or "none"
    if backend is not None and backend not in installed:
        raise InvalidRequestError(
            f"--backend {shown(backend)} is not installed; installed are: {listed}"
        )
    options: dict[str, dict[str, str]] = {}
    for text in (*environ.get(VARIABLE, "").split(), *given):
        key, separator, value = text.partition("=")
        owner, name = key.split(".", 1) if "." in key else (backend or "", key)
        if not (separator and owner and name):
            raise InvalidRequestError(
                f"the option {shown(key)} is not of the form BACKEND.NAME=VALUE, such as "
                "eks.namespace=training, or NAME=VALUE with --backend"
            )
        if owner not in installed:
            raise InvalidRequestError(
                f"the option {shown(key)}: {owner} is not installed here; installed are: {listed}"
            )
        if text in given and backend not in {None, owner}:
            raise InvalidRequestError(
                f"--option {owner}.{name}=… is for another backend than --backend {backend}"
            )
        options.setdefault(owner, {})[name] = value
    return Choice(backend, (backend,) if backend else tuple(installed), options, tuple(given))


class UnsetError(InvalidRequestError):
    """Raised when a backend needs an option that was not given, so it was not asked."""


def read_options(
    owner: str, described: Sequence[Option], given: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of the options of a backend or a command.

    Args:
        owner: Its name, for errors.
        described: All of its options.
        given: The text that was given for some of them, by name.

    Raises:
        UnsetError: A required option was not given.
        InvalidRequestError: There is no such option, or the text is not a value for it. Limits on
            the value are checked by its owner.
    """
    by_name = {option.name: option for option in described}
    if unknown := sorted(given.keys() - by_name.keys()):
        raise InvalidRequestError(
            f"{owner} has no option {shown(unknown[0])}; it has {', '.join(by_name) or 'none'}"
        )
    required = [name for name, option in by_name.items() if option.default == REQUIRED]
    if missing := [f"--option {owner}.{name}=…" for name in required if name not in given]:
        raise UnsetError(
            f"{owner} needs {' '.join(missing)}, or the same in the variable DILOCO_OPTIONS"
        )
    return {name: read_value(by_name[name], text) for name, text in given.items()}


def read_value(option: Option, text: str) -> Any:
    """Return the value that a text means for an option.

    Raises:
        InvalidRequestError: The text is not a value of its type, or the option cannot be given as
            text.
    """
    read = _READERS.get(option.type)
    if read is None and " or " not in option.type:  # which are words to choose from
        raise InvalidRequestError(
            f"the option {option.name} ({option.type}) cannot be given on the command line"
        )
    try:
        return text if read is None else read(text)
    except InvalidRequestError:  # of a journal, which says more
        raise
    except (KeyError, ValueError, RecursionError):
        raise InvalidRequestError(
            f"{option.name}={shown(text, f'[{option.name}]')} is not allowed: it is a "
            f"{option.type}. Lists are written a,b or as JSON, mappings as JSON"
        ) from None


def _list(text: str) -> Any:
    return json.loads(text) if text.startswith("[") else text.split(",") if text else []


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else read(text)


_READERS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("text", "path", "quantity"), str),
    "whole number": _or_none(int),
    "number": _or_none(float),
    "bool": lambda text: _FLAGS[text.lower()],
    **dict.fromkeys(("list of text", "list of paths"), _list),
    "True, False or list of text": lambda text: _FLAGS.get(text.lower(), _list(text)),
    **dict.fromkeys(_IN_JSON, json.loads),
    "RunJournal": FolderJournal,
}


PATIENCE = 90.0
"""Seconds in which a backend has to answer; its own retries end earlier, by default."""


@dataclass(frozen=True)
class Run:
    """A run that was found.

    Attributes:
        run_id: Its name.
        backend: The backend that has it.
        executor: An executor of that backend.
        handles: Its replicas there, in rank order.
        notes: Sentences on backends that could not be searched.
    """

    run_id: str
    backend: str
    executor: BaseExecutor
    handles: list[ReplicaHandle]
    notes: tuple[str, ...] = ()

    def replicas(self) -> list[dict[str, Any]]:
        """Ask the backend about the replicas; the facts about each."""
        seen = self.executor.describe_run(self.handles)
        return [replica_facts(handle, seen.get(handle)) for handle in self.handles]

    def names(self) -> dict[str, Any]:
        """Return what names it, as a JSON value."""
        return {"run_id": self.run_id, "backend": self.backend, "place": place_of(self.handles)}


class Answers(NamedTuple, Generic[T]):
    """The answers of backends, by their names.

    Attributes:
        found: The answers.
        unset: What is wrong with those that were not asked, since they need options.
        failed: What is wrong with those that have not answered.
    """

    found: dict[str, T]
    unset: dict[str, str]
    failed: dict[str, str]

    def notes(self, done: str) -> list[str]:
        """Return sentences on the backends without an answer, which were to be ``done``."""
        notes = [f"{name} could not be {done}: {text}" for name, text in self.failed.items()]
        return notes + [f"{name} was not {done}: {text}" for name, text in self.unset.items()]


def in_thread(question: Callable[[], T]) -> Future[T]:
    """Ask in a thread, and return what will hold the answer, or the error that was raised.

    The thread ends with this process if the backend or the store never answers.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - it is the answer
            left = RuntimeError(f"it raised {error!r}")  # as SystemExit, which is not its to say
            answer.set_exception(error if isinstance(error, Exception) else left)

    threading.Thread(target=ask, daemon=True).start()
    return answer


def make_executor(name: str, given: Mapping[str, str]) -> BaseExecutor:
    """Import a backend and make an executor with the options that were given as text.

    Raises:
        InvalidRequestError: The backend cannot be loaded, or an option is not allowed.
    """
    backend = get_executor(name)
    if not (isinstance(backend, type) and issubclass(backend, BaseExecutor)):
        raise InvalidRequestError(
            f"{name} has only the verbs of ServerlessExecutor: runs cannot be found again there"
        )
    return backend(**read_options(name, backend.options(), given))


@dataclass(frozen=True)
class Backends:
    """The backends of a choice. Executors are made when they are first needed, and closed here.

    Args:
        choice: The backends and their options.
        patience: Seconds in which a backend has to answer.
        make: Makes an executor; for tests.

    Attributes:
        made: The executors.
    """

    choice: Choice
    patience: float = PATIENCE
    make: Callable[[str, Mapping[str, str]], BaseExecutor] = make_executor
    made: list[BaseExecutor] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self.made:
            executor.close()

    def ask(self, question: Callable[[BaseExecutor], T]) -> Answers[T]:
        """Ask all backends at the same time. One that does not know a run is left out.

        Raises:
            InvalidRequestError: No backend is installed.
            Exception: What the backend that was named has raised.
        """
        if not self.choice.names:
            raise InvalidRequestError(
                "no backend is installed here: install the one that runs your replicas beside "
                "diloco-cli, such as diloco-local, diloco-eks, diloco-sagemaker or diloco-modal"
            )

        def ask_one(name: str) -> T:
            executor = self.make(name, self.choice.options.get(name, {}))
            try:
                return question(executor)
            finally:  # one that has not answered might not let itself close
                self.made.append(executor)

        futures = {name: in_thread(partial(ask_one, name)) for name in self.choice.names}
        wait(futures.values(), timeout=self.patience)
        late = UnavailableError(f"there was no answer in {self.patience:g} s")
        answers = Answers[T]({}, {}, {})
        for name, future in futures.items():
            error = future.exception() if future.done() else late
            if error is None:
                answers.found[name] = future.result()
            elif self.choice.backend:
                raise error
            elif isinstance(error, UnsetError):
                answers.unset[name] = str(error)
            elif not isinstance(error, ReplicaNotFoundError):
                answers.failed[name] = clean(str(error)) or type(error).__name__
        return answers

    def find(self, run_id: str) -> Run:
        """Return the run of a name; exactly one backend must have it.

        Raises:
            ReplicaNotFoundError: No backend has it, and all that could be asked said so.
            UnavailableError: No backend has it, and one of them could not be asked.
            InvalidRequestError: Several backends have it, or the name or an option is not allowed.
        """
        if not is_run_id(run_id):
            raise InvalidRequestError(
                f"a run is named by its run_id, not {shown(run_id)}: `diloco ls` names the runs"
            )
        answers = self.ask(lambda executor: (executor, executor.attach(run_id)))
        if len(answers.found) > 1:
            raise InvalidRequestError(
                f"{' and '.join(answers.found)} each have a run {run_id}: say which one you mean, "
                "with " + " or ".join(f"--backend {name}" for name in answers.found)
            )
        for name, (executor, handles) in answers.found.items():
            notes = answers._replace(unset={}).notes("searched")
            return Run(run_id, name, executor, handles, tuple(notes))
        silent = {**answers.unset, **answers.failed}
        searched = [name for name in self.choice.names if name not in silent]
        none = [f"there is no run {run_id} on {', '.join(searched)}"] * bool(searched)
        text = ". ".join(none + answers.notes("searched"))
        if answers.failed or not searched:
            raise UnavailableError(f"{text}. So it is not known whether there is a run {run_id}")
        raise ReplicaNotFoundError(f"{text}. `diloco ls` names the runs; a folder is ./{run_id}")
