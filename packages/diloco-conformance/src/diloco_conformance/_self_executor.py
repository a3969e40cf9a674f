"""Check that ``make_executor`` makes a new executor, which waits by the world's clock."""

from __future__ import annotations

import math
import time
from typing import Any

from diloco_protocol import BaseExecutor, Capabilities

from ._blame import fault, line_of
from ._harness import Harness
from ._promises import HarnessFault
from ._self_options import check_options, close

#: The attributes that an executor must declare, each with an example.
DECLARED = {
    "backend_name": (str, 'backend_name = "my_platform"'),
    "supports_inter_replica_network": (bool, "supports_inter_replica_network = False"),
    "capabilities": (Capabilities, 'capabilities = Capabilities(cancel_scope="replica")'),
}


def check_executor(harness: Harness) -> None:
    """Check two new executors.

    Raises:
        HarnessFault: Says what is wrong with them.
    """
    executor: Any = harness.make_executor()
    kind = type(executor).__name__
    check_kind(harness, "make_executor", executor)
    for name, (wanted, example) in DECLARED.items():
        value = getattr(executor, name, None)
        if not isinstance(value, wanted):
            text = f"has {name} = {value!r}" if hasattr(executor, name) else f"lacks {name}"
            raise HarnessFault(
                f"{kind} {text}: it must be {wanted.__name__}, declared on the class, such as "
                f"{example}"
            )
    if not hasattr(executor, "_backoff"):
        raise HarnessFault(
            f"the __init__ of {kind} must call super().__init__(backoff=…)"
            f"{line_of(type(executor).__init__)}"
        )
    if harness.make_executor() is executor:
        fault(
            harness,
            (
                "make_executor() returned the same object twice: it must make a new "
                "executor, which "
                "has seen nothing"
            ),
            "make_executor",
        )
    # There is no other way to see which clock the executor waits by
    pauses = executor._backoff  # noqa: SLF001
    virtual = type(harness).sleep is Harness.sleep
    far = abs(pauses.clock() - harness.clock()) > max(10.0, harness.slack)
    if far or (virtual and pauses.sleep is time.sleep):
        fault(
            harness,
            f"make_executor() makes a {kind} that waits by another clock than the harness's. "
            "Either make_executor() does not pass backoff=self.backoff(), or the __init__ of "
            f"{kind} does not pass it on: super().__init__(backoff=backoff)",
            "make_executor",
        )
    close(harness, executor)
    check_options(harness)


def check_kind(harness: Harness, method: str, executor: object) -> None:
    """Check that what a method returned is an executor."""
    if not isinstance(executor, BaseExecutor):
        fault(
            harness,
            f"{method}() returned {executor!r} ({type(executor).__name__}), which is no executor: "
            "it must be a subclass of diloco_protocol.BaseExecutor",
            method,
        )


def check_clocks(harness: Harness) -> None:
    """Check that both clocks tell seconds."""
    for name in ("clock", "now"):
        moment = getattr(harness, name)()
        known = isinstance(moment, (int, float)) and not isinstance(moment, bool)
        if not (known and math.isfinite(moment)):
            fault(harness, f"{name}() returned {moment!r}: it must return seconds, a number", name)


def check_time(harness: Harness) -> None:
    """Check that time passes, by both clocks, when the harness is told to let it pass."""
    seconds = min(1.0, harness.short_timeout / 60)
    before, then = harness.clock(), harness.now()
    harness.advance(seconds)
    passed = harness.clock() - before
    if not passed >= 0.9 * seconds:
        fault(
            harness,
            f"advance({seconds:g}) let {passed:g} s pass by clock(): call "
            "self.time.sleep(seconds) in it, and then do what the world does by itself",
            "advance",
        )
    moment = harness.clock()
    harness.settle()
    if type(harness).sleep is Harness.sleep and harness.clock() - moment > harness.short_timeout:
        fault(
            harness,
            f"settle() let {harness.clock() - moment:g} s pass although nothing was under way: "
            "what was launched would be past its timeout after it",
            "settle",
        )
    passed = harness.now() - then
    stands = passed == 0 and type(harness).sleep is Harness.sleep
    if stands or not passed >= 0.9 * seconds - harness.resolution:
        fault(
            harness,
            (
                f"advance({seconds:g}) let {passed:g} s pass by now(), and more by "
                "clock(): both must "
                "go on together"
            ),
            "now",
        )
