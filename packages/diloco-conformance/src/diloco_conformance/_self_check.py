"""Whether a harness can judge at all: looked at before the first test, so that its faults are not called the executor's."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import _pytest.outcomes

from diloco_protocol import BackendError, BaseExecutor, Capabilities

from ._harness import Harness, Step, Told, Truth
from ._promises import HarnessFault, PromiseBroken

#: How the suite calls each method of a harness.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "make_executor": ((), {}),
    "drive": ((None, Step.START, None), {}),
    "settle": ((), {}),
    "advance": ((1.0,), {}),
    "truth": ((None,), {}),
    "living": ((), {}),
    "expire": (([],), {}),
    "inject": ((None, None), {"after": 0}),
    "clear": ((), {}),
    "calls": ((), {}),
    "sent": ((), {}),
    "told": ((None,), {}),
    "write": ((None, b"", "stdout"), {}),
    "secret": (("",), {}),
    "labels": ((None,), {}),
    "age": ((1.0,), {}),
    "elsewhere": ((), {}),
    "now": ((), {}),
    "clock": ((), {}),
    "sleep": ((1.0,), {}),
    "backoff": ((), {}),
    "close": ((), {}),
}

#: Attributes of a harness, and what each must be.
SECONDS = ("timeout", "short_timeout", "overrun", "slack", "resolution", "patience")

#: What an executor must declare, and an example.
DECLARED = {
    "backend_name": (str, 'backend_name = "my_platform"'),
    "supports_inter_replica_network": (bool, "supports_inter_replica_network = False"),
    "capabilities": (Capabilities, 'capabilities = Capabilities(cancel_scope="replica")'),
}

VERBS = ("poll", "describe", "collect", "attach", "list_runs", "exists", "_observe", "_observe_run")


def check_harness(make_harness: Callable[[], object], owner: str) -> None:
    """Look at a harness, its executor, and what the world does when it is told.

    Args:
        make_harness: Makes a fresh one.
        owner: Whose it is, for the messages.

    Raises:
        HarnessFault: Something is missing or wrong; says what to do.
    """
    harness = _make(make_harness, owner)
    try:
        _check_class(harness)
        _check_executor(harness)
        _check_time(harness)
        with contextlib.suppress(PromiseBroken, BackendError, _pytest.outcomes.Skipped):
            _check_world(harness)  # what the executor does wrong, the tests will say
    finally:
        with contextlib.suppress(Exception):
            harness.close()


def _fault(harness: object, text: str) -> NoReturn:
    raise HarnessFault(f"{type(harness).__name__}: {text}")


def _make(make_harness: Callable[[], object], owner: str) -> Harness:
    try:
        harness = make_harness()
    except TypeError as error:
        if "abstract" in str(error):
            raise HarnessFault(
                f"{error}. A harness supplies all of these methods; docs/harness.md of diloco-conformance says how"
            ) from error
        raise
    if not isinstance(harness, Harness):
        raise HarnessFault(
            f"{owner}.make_harness() returned {harness!r}: it must return a fresh object of a class that subclasses Harness"
        )
    if not hasattr(harness, "time"):
        _fault(harness, "its __init__ must call super().__init__(), which makes the clock")
    return harness


# --- the class ---


def _check_class(harness: Harness) -> None:
    cls = type(harness)
    if not isinstance(getattr(harness, "entrypoint", None), str):
        _fault(
            harness,
            'it lacks entrypoint: set it to what is launched, such as entrypoint = "my_module:my_function"',
        )
    for name in ("entrypoint_args", "cannot"):
        if not isinstance(getattr(harness, name), Mapping):
            _fault(harness, f"{name} must be a dict, not {getattr(harness, name)!r}")
    for name in SECONDS:
        value = getattr(harness, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            _fault(harness, f"{name} must be a number of seconds, not {value!r}")
    if not harness.short_timeout < harness.timeout:
        _fault(
            harness,
            f"short_timeout ({harness.short_timeout:g} s) must be shorter than timeout ({harness.timeout:g} s), "
            "which no test reaches",
        )
    for name, (arguments, options) in CALLS.items():
        method = getattr(harness, name)
        try:
            inspect.signature(method).bind(*arguments, **options)
        except TypeError as error:
            ours = inspect.signature(getattr(Harness, name))
            _fault(
                harness,
                f"{name} is called as {name}{ours}, and takes {name}{inspect.signature(method)}: {error}",
            )
    for name in dir(cls):
        if name.startswith("_") or hasattr(Harness, name):
            continue
        near = difflib.get_close_matches(name, [*CALLS, *SECONDS], 1, 0.85)
        if near and callable(getattr(cls, name)) == callable(getattr(Harness, near[0])):
            missing = getattr(cls, near[0], None) is getattr(Harness, near[0], None)
            if missing:
                _fault(harness, f"it has {name}, which the suite never uses: is it {near[0]}?")


# --- the executor ---


def _check_executor(harness: Harness) -> None:
    executor: Any = harness.make_executor()
    kind = type(executor).__name__
    if not isinstance(executor, BaseExecutor):
        _fault(
            harness,
            f"make_executor() returned {executor!r} ({kind}), which is no executor: it must be a subclass of "
            "diloco_protocol.BaseExecutor",
        )
    for name, (wanted, example) in DECLARED.items():
        value = getattr(executor, name, None)
        if not isinstance(value, wanted):
            said = f"has {name} = {value!r}" if hasattr(executor, name) else f"lacks {name}"
            raise HarnessFault(
                f"{kind} {said}: it must be {wanted.__name__}, declared on the class, such as {example}"
            )
    if not hasattr(executor, "_backoff"):
        raise HarnessFault(f"the __init__ of {kind} must call super().__init__(backoff=…)")
    if harness.make_executor() is executor:
        _fault(
            harness,
            "make_executor() returned the same object twice: it must make a new executor, which has seen nothing",
        )
    pauses = executor._backoff  # noqa: SLF001 - there is no other way to see which clock it waits by
    virtual = type(harness).sleep is Harness.sleep
    far = abs(pauses.clock() - harness.clock()) > max(10.0, harness.slack)
    if far or (virtual and pauses.sleep is time.sleep):
        _fault(
            harness,
            f"make_executor() makes a {kind} that waits by another clock than the harness's: pass backoff=self.backoff()",
        )
    executor.close()


# --- the world ---


def _check_time(harness: Harness) -> None:
    seconds = min(1.0, harness.short_timeout / 60)
    before = harness.clock()
    harness.advance(seconds)
    passed = harness.clock() - before
    if not (math.isfinite(passed) and passed >= 0.9 * seconds):
        _fault(
            harness,
            f"advance({seconds:g}) let {passed:g} s pass by clock(): call self.time.sleep(seconds) in it, and then do "
            "what the world does by itself",
        )


def _check_world(harness: Harness) -> None:
    from ._lab import Lab  # the lab stands on everything else

    lab = Lab(harness)
    try:
        _check_answers(lab)
        one, other = lab.up(1), lab.up(1)
        handle = one.handles[0]
        with _spied(lab.executor) as asked:
            harness.truth(handle)
            harness.living()
        if asked:
            _fault(
                harness,
                f"truth() or living() calls the executor ({', '.join(sorted(set(asked)))}): what is true must come from the "
                "world itself, or the suite compares the executor with itself",
            )
        if lab.can(Step.PRINT):
            lab.drive(other.replicas[0], Step.PRINT, ["self-check"])
            if not lab.executor.stream_logs(other.handles[0]):
                _fault(
                    harness,
                    "after drive(…, Step.PRINT, ['self-check']) the log is empty. Either drive writes where the executor "
                    "does not read, or the executor reads no logs: mend what is wrong, or declare Step.PRINT in cannot",
                )
        lab.cancel(one.replicas[0])
        accepted = harness.truth(handle).stopping
        harness.settle()
        truth = harness.truth(handle)
        if accepted and truth.state is not None and not truth.state.terminal:
            _fault(
                harness,
                f"settle() returned while a cancel is still under way ({truth}): it must let everything that has begun come "
                "to its end, however long that takes in this world",
            )
    finally:
        with contextlib.suppress(BackendError):
            for handle in [handle for run in lab.runs for handle in run.handles]:
                lab.executor.cancel(handle)
            harness.settle()


def _check_answers(lab: Any) -> None:
    """What the hooks return has the right type."""
    harness = lab.harness
    run = lab.launch(1)
    truth = harness.truth(run.handles[0])
    if not isinstance(truth, Truth):
        _fault(harness, f"truth() returned {truth!r}: it must return a Truth(state, alive=…)")
    living = harness.living()
    if isinstance(living, bool) or not isinstance(living, int):
        _fault(harness, f"living() returned {living!r}: it must return how many replicas are alive")
    checks: list[tuple[str, Any, type]] = [
        ("calls", (), int),
        ("sent", (), list),
        ("told", run.handles, Told),
    ]
    if not harness.starts_by_itself:
        lab.drive(run.replicas[0], Step.START)
    for name, arguments, wanted in checks:
        if lab.can(name):
            value = getattr(harness, name)(*arguments)
            if not isinstance(value, wanted):
                _fault(harness, f"{name}() returned {value!r}: it must be {wanted.__name__}")


@contextlib.contextmanager
def _spied(executor: BaseExecutor) -> Iterator[list[str]]:
    """Note which verbs of any executor of this class are called meanwhile."""
    asked: list[str] = []
    classes = [cls for cls in type(executor).__mro__ if issubclass(cls, BaseExecutor)]
    found = [(cls, name) for cls in classes for name in VERBS if name in vars(cls)]
    kept = [(cls, name, vars(cls)[name]) for cls, name in found]

    def spy(name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            asked.append(name.lstrip("_"))
            return real(*arguments, **options)

        return call

    for cls, name, real in kept:
        setattr(cls, name, spy(name, real))
    try:
        yield asked
    finally:
        for cls, name, real in kept:
            setattr(cls, name, real)
