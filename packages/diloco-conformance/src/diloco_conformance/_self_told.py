"""Check that what a harness tells is true, and comes from the world."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from diloco_protocol import BackendError

from ._blame import fault
from ._harness import Ability, Told
from ._self_executor import check_kind
from ._self_options import close
from ._self_sample import Sample
from ._self_watch import shared, verbs_in, watch
from ._world_hooks import Resources


def truth_is_its_own(sample: Sample) -> None:
    """Check that the truth comes neither from the executor nor from the code that it uses."""
    lab, harness, handle = sample.lab, sample.harness, sample.first.handle
    truth_calls = watch(lambda: (harness.truth(handle), harness.living()))
    if verbs := verbs_in(truth_calls, lab.executor):
        fault(
            harness,
            f"truth() or living() calls the executor ({', '.join(verbs)}): what is true must come "
            "from the world itself, or the suite compares the executor with itself",
            "truth",
        )
    with sample.fresh() as executor:
        describe_calls = watch(lambda: executor.describe(handle))
    if both := shared(truth_calls, describe_calls):
        fault(
            harness,
            f"truth() has its states from {', '.join(both)}, and so has the executor: if that is "
            "wrong, both are wrong alike, and no test sees it. Write down once more, in the "
            "harness, which word of the platform means which state",
            "truth",
        )


class _Marked(int):
    """A number that can be told from others."""


def told_is_what_the_replica_was_told(sample: Sample) -> None:
    """Check that told() gives what the replica was told, and not what the handle says."""
    harness = sample.harness
    if not sample.lab.can(Ability.TOLD):
        return
    told = harness.told(sample.first.handle)
    if not isinstance(told, Told):
        fault(
            harness, f"told() returned {told!r}: it must return a Told(rank, world_size, …)", "told"
        )
    for name, kind in (("rank", int), ("world_size", int), ("kwargs", dict)):
        if not isinstance(value := getattr(told, name), kind):
            fault(harness, f"told() returned {name}={value!r}: it must be {kind.__name__}", "told")
    if not isinstance(told.environment, Mapping):
        fault(harness, f"told() returned environment={told.environment!r}: it must be dict", "told")
    for name in ("rank", "world_size"):
        handle = copy.copy(sample.first.handle)
        object.__setattr__(handle, name, _Marked(getattr(handle, name)))
        try:
            theirs = isinstance(getattr(harness.told(handle), name), _Marked)
        except BackendError:  # the code that was given it does not take this kind of number
            theirs = True
        if theirs:
            fault(
                harness,
                f"told() has its {name} from the handle: it must be what the replica itself was "
                "told, by its environment, its spec or its own report, or no test sees a replica "
                "that was told something else",
                "told",
            )


def calls_are_counted(sample: Sample) -> None:
    """Check that a look at the backend counts as a call."""
    if not sample.lab.can(Ability.CALLS):
        return
    harness, handle = sample.harness, sample.first.handle
    before = harness.calls()
    if isinstance(before, bool) or not isinstance(before, int):
        fault(harness, f"calls() returned {before!r}: it must be int", "calls")
    with sample.fresh() as executor:
        for look in (lambda: executor.poll(handle), executor.list_runs):
            sample.ask(look)
    if (after := harness.calls()) <= before:
        fault(
            harness,
            f"calls() was {before} before poll and list_runs by an executor that had seen "
            f"nothing, and is {after} after them: it must count every call that reaches the "
            "platform",
            "calls",
        )


def what_was_sent_is_kept(sample: Sample) -> None:
    """Check that the launch of the sample is among the requests that were sent."""
    if not sample.lab.can(Ability.SENT):
        return
    sent = sample.harness.sent()
    if not isinstance(sent, list) or not all(isinstance(one, Mapping) for one in sent):
        fault(sample.harness, f"sent() returned {sent!r}: it must be list of dict", "sent")
    if not sent:
        fault(
            sample.harness,
            "sent() is empty after a launch: it must return the requests of all launches so far, "
            "in the words of Plan.requests",
            "sent",
        )
    sample.lab.launch(1)
    if (now := sample.harness.sent())[: len(sent)] != sent or len(now) == len(sent):
        fault(
            sample.harness,
            f"sent() had {len(sent)} requests before a launch, and has {len(now)} after it, of "
            f"which not all of the first {len(sent)} are the same: it must keep all requests, in "
            "order",
            "sent",
        )


def records_have_their_types(sample: Sample) -> None:
    """Check the types of labels, resources and references of secrets."""
    lab, harness = sample.lab, sample.harness
    if lab.can(Ability.LABELS) and not isinstance(
        labels := harness.labels(sample.first.handle), Mapping
    ):
        fault(harness, f"labels() returned {labels!r}: it must be a dict", "labels")
    if lab.can(Ability.RESOURCES) and not isinstance(
        value := harness.resources(sample.first.handle), Resources
    ):
        fault(harness, f"resources() returned {value!r}: it must be a Resources(…)", "resources")
    if lab.can(Ability.SECRETS):
        reference = harness.secret("conf-secret")
        if not isinstance(reference, str) or not reference or reference == "conf-secret":
            fault(
                harness,
                (
                    f"secret() returned {reference!r}: it must be the reference under "
                    "which the store "
                    "has the secret, a text"
                ),
                "secret",
            )


def elsewhere_is_elsewhere(sample: Sample) -> None:
    """Check that an executor on another account sees nothing of the sample."""
    if not sample.lab.can(Ability.ELSEWHERE):
        return
    harness, run_id = sample.harness, sample.first.run.run_id
    executor = harness.elsewhere()
    check_kind(harness, "elsewhere", executor)
    try:
        if executor.backend_name != sample.lab.executor.backend_name:
            fault(
                harness,
                f"elsewhere() returned an executor of {executor.backend_name!r}: it must be of "
                "the same backend, on another account, cluster or host",
                "elsewhere",
            )
        if run_id in sample.ask(executor.list_runs):
            fault(
                harness,
                f"the executor of elsewhere() lists {run_id!r}, which was launched here: it must "
                "work on another account, cluster or host, whose runs are others",
                "elsewhere",
            )
    finally:
        close(harness, executor)


TOLD_CHECKS: list[Callable[[Sample], None]] = [
    truth_is_its_own,
    told_is_what_the_replica_was_told,
    calls_are_counted,
    what_was_sent_is_kept,
    records_have_their_types,
    elsewhere_is_elsewhere,
]
