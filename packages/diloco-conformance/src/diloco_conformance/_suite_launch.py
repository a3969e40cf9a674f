"""Starting replicas: L1 to L5, and L7."""

from __future__ import annotations

from typing import Any

from diloco_protocol import BackendError

from ._check_collect import collect
from ._harness import Ability, Fault, Operation, Step
from ._lab import Lab
from ._scenes import conflicting_launch, doubtful_launch, failing_launch, other_launch
from ._suite_told import NESTED


class Launching:
    """Fixed tests of L1 to L5, and L7."""

    def test_l1_handles_are_distinct(self, lab: Lab) -> None:
        """Compare handles in a run, and of unnamed runs that were launched in the same second."""
        for n in (1, 3, 2):
            lab.launch(n, named=False)
            lab.launch(n)
        handles = [handle for run in lab.runs for handle in run.handles]
        if len(set(handles)) != len(handles) or len(
            {handle.to_json() for handle in handles}
        ) != len(handles):
            lab.broken("L1", str(handles), "no two replicas have the same handle")
        lab.observe_all()

    def test_l2_a_refused_launch_leaves_nothing(self, lab: Lab) -> None:
        """Refuse the launch at the first call, or at a later one; the next try must succeed."""
        lab.needs(Operation.LAUNCH, Fault.FORBIDDEN)
        for after in range(4):
            run_id = failing_launch(lab, after)
            if run_id is None:
                continue
            run = lab.launch(3, run_id=run_id)
            living = [one for one in run.replicas if lab.harness.truth(one.handle).alive]
            if len(living) != 3:
                lab.broken("L2", f"{run.name} was launched again", f"{len(living)} replicas live")
            lab.observe_all()

    def test_l2_what_survives_is_named(self, lab: Lab) -> None:
        """Check that the error has the handles of all that could not be ended, and they work."""
        lab.needs(Operation.LAUNCH, Operation.CANCEL, Fault.FORBIDDEN)
        for after in range(4):
            failing_launch(lab, after, stuck=True)

    def test_l3_a_refused_launch_of_what_is_there_changes_nothing(self, lab: Lab) -> None:
        """Check that a later launch does not end what an earlier one has started."""
        lab.needs(Operation.LAUNCH, Fault.FORBIDDEN)
        run = lab.up(3)
        before = [lab.harness.truth(handle) for handle in run.handles]
        with lab.fault(Operation.LAUNCH, Fault.FORBIDDEN):
            try:
                lab.relaunch(run)
            except BackendError as error:
                lab.note(f"it raised {type(error).__name__}")
        after = [lab.harness.truth(handle) for handle in run.handles]
        if after != before:
            lab.broken("L3", "launched again, and refused", f"it was {before} and is {after}")
        lab.settle()
        lab.observe_all()

    def test_l3_a_launch_that_cannot_look_changes_nothing(self, lab: Lab) -> None:
        """Check that nothing is created while it is unknown whether the run is there already."""
        lab.needs(Operation.OBSERVE)
        run = lab.up(2)
        before = [lab.harness.truth(handle) for handle in run.handles], lab.harness.living()
        for fault in lab.faults(Fault.SERVER_ERROR, Fault.FORBIDDEN):
            with lab.fault(Operation.OBSERVE, fault):
                try:
                    lab.relaunch(run)
                except BackendError as error:
                    lab.note(f"it raised {type(error).__name__}")
            after = [lab.harness.truth(handle) for handle in run.handles], lab.harness.living()
            if after != before:
                lab.broken("L3", f"launched again, {fault}", f"it was {before} and is {after}")
        lab.observe_all()

    def test_l3_the_same_run_id_is_the_same_run(self, lab: Lab) -> None:
        """Launch a run again at once, when it runs, when it has ended, and from another process."""
        run = lab.launch(2)
        for what in ("start", "end", "forget"):
            lab.advance(3 * lab.harness.resolution)  # a run started anew would be dated later
            living = lab.harness.living()
            handles = lab.relaunch(run)
            if handles != run.handles or lab.harness.living() != living:
                lab.broken(
                    "L3",
                    f"it gave {handles}, {lab.harness.living()} replicas live",
                    f"{run.handles}, {living} lived",
                )
            lab.observe_all()
            for replica in run.replicas:
                if what == "start":
                    lab.drive(replica, Step.START)
                if what == "end":
                    lab.drive(replica, Step.SUCCEED, "once")
            if what == "forget":
                lab.forget()
        collect(lab, run.replicas)

    def test_l3_what_was_cancelled_is_not_started_again(self, lab: Lab) -> None:
        """Launch a cancelled run again while it ends and afterwards: it stays cancelled.

        The last of these launches is made from another process.
        """
        with lab.part_of("L3"):
            self._cancelled(lab)

    def _cancelled(self, lab: Lab) -> None:
        run = lab.up(2)
        lab.cancel_run(run)
        for what in ("settle", "forget", ""):
            handles = lab.relaunch(run)
            if handles != run.handles:
                lab.broken("L3", f"it gave {handles}", f"{run.handles}")
            if what == "settle":
                lab.settle()
            elif what == "forget":
                lab.forget()
            lab.observe_all()
        if living := lab.harness.living():
            lab.broken("L3", f"{living} replicas live", "both were cancelled")
        collect(lab, run.replicas)

    def test_l3_the_same_in_other_words_is_the_same_run(self, lab: Lab) -> None:
        """Vary the order of keys, empty mappings for none, and 60.0 for 60: nothing changes."""
        kwargs, env = {"b": [1], "a": {"y": 1, "x": 2}}, {"ONE": "1", "TWO": "2"}
        run = lab.up(2, kwargs=kwargs, env=env, timeout=600)
        again = {"kwargs": {"a": {"x": 2, "y": 1}, "b": [1], "number": run.kwargs["number"]}}
        for options in (
            {},
            again,
            {"env": dict(reversed(env.items()))},
            {"timeout": 600.0},
            {"labels": {}, "secrets": {}, "world_size": 2, "rank_offset": 0},
        ):
            living = lab.harness.living()
            try:
                same = lab.relaunch(run, **options) == run.handles
            except BackendError as error:
                lab.broken("L3", f"it raised {error!r}", f"{options} is the same launch")
            if not same or lab.harness.living() != living:
                lab.broken("L3", "it gave other handles, or started more", f"{options} is the same")

    def test_l3_another_launch_under_the_same_run_id_is_refused(self, lab: Lab) -> None:
        """Check that such a launch also changes nothing."""
        run = lab.up(2)
        for n, more in ((3, {}), (1, {}), (2, {"other": 1})):
            conflicting_launch(lab, run, n, more)
        lab.observe_all()

    def test_l7_every_argument_counts(self, lab: Lab) -> None:
        """Change one argument at a time, for a pending, a running and an ended run.

        Each launch must be refused, and change nothing.
        """
        options: dict[str, Any] = {"env": {"A": "1"}, "labels": {"team": "blue"}, "world_size": 5}
        run = lab.launch(2, kwargs={"x": 1, "y": {"z": [1]}}, **options)
        for what in ("start", "end", "nothing"):
            for number, (n, change) in enumerate(self._changes(lab, run.kwargs)):
                if what == "end" or number % 5 == 0:  # all while it runs, some before and after
                    other_launch(lab, run, n, change)
            lab.observe_all()
            for replica in run.replicas:
                if what != "nothing":
                    lab.drive(replica, Step.START if what == "start" else Step.SUCCEED)
            lab.forget()

    def _changes(self, lab: Lab, kwargs: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        timeout = lab.harness.timeout
        changes: list[dict[str, Any]] = [
            {"kwargs": {**kwargs, "x": 2}},
            {"kwargs": {**kwargs, "x": 1.0}},
            {"kwargs": {**kwargs, "x": True}},
            {"kwargs": {**kwargs, "x": "1"}},
            {"kwargs": {**kwargs, "y": {"z": [1, None]}}},
            {"kwargs": {**kwargs, "more": None}},
            {"kwargs": {**kwargs, "rank_env": "MY_RANK"}},
            {"kwargs": {**kwargs, "world_size_env": "MY_SIZE"}},
            {"kwargs": {**kwargs, "rendezvous_uri": "file:///elsewhere"}},
            {"env": {"A": "2"}},
            {"env": {"A": "1 "}},
            {"env": {"a": "1"}},
            {"env": {"A": "1", "B": "1"}},
            {"env": None},
            {"timeout": timeout + 1},
            {"timeout": timeout - 0.5},
            {"timeout": None},
            {"entrypoint": "another_module:another_function"},
            {"entrypoint": f"{lab.harness.entrypoint}_too"},
            {"labels": {"team": "red"}},
            {"labels": None},
            {"max_restarts": 1},
            {"spot": True},
            {"spot": False},
            {"gpu": "2"},
            {"cpu": 3},
            {"memory": "3Gi"},
            {"rank_offset": 1},
            {"world_size": 6},
            {"cohort": "another"},
        ]
        if lab.can(Ability.SECRETS):
            changes.append({"secrets": {"S": lab.harness.secret("s")}})
        return [(2, change) for change in changes] + [(1, {}), (3, {})]

    def test_l3_a_launch_whose_answer_is_lost_is_found_again(self, lab: Lab) -> None:
        """Check that no replica is started twice, and none is left behind."""
        lab.needs(Operation.LAUNCH, Fault.AMBIGUOUS)
        for after in range(3):
            run = doubtful_launch(lab, after)
            lab.observe_all()
            lab.cancel(run.replicas[0])
        lab.settle()
        lab.observe_all()

    def test_l4_wrong_arguments_are_refused_before_anything_is_called(self, lab: Lab) -> None:
        """Check that the error is a ValueError."""
        calls = lab.harness.calls() if lab.can(Ability.CALLS) else 0
        living = lab.harness.living()
        entrypoint = lab.harness.entrypoint
        wrong: list[tuple[Any, Any, Any, dict[str, Any]]] = [
            (0, entrypoint, {}, {}),
            (-1, entrypoint, {}, {}),
            (1.5, entrypoint, {}, {}),
            (1, "no entrypoint", {}, {}),
            (1, lambda: None, {}, {}),
            (1, entrypoint, {"x": object()}, {}),
            (1, entrypoint, {"x": float("nan")}, {}),
            (1, entrypoint, {"x": {1: "key"}}, {}),
            (1, entrypoint, {"no name": 1}, {}),
            (1, entrypoint, {}, {"timeout": 0}),
            (1, entrypoint, {}, {"timeout": -5.0}),
            (1, entrypoint, {}, {"run_id": "Not_A_Name"}),
            (1, entrypoint, {}, {"run_id": "x" * 100}),
            (1, entrypoint, {}, {"env": {"REPLICA_RANK": "7"}}),
            (1, entrypoint, {}, {"env": {"A-B": "1"}}),
            (1, entrypoint, {}, {"gpu": "NO-SUCH-GPU:3"}),
            (2, entrypoint, {}, {"rank_offset": 3, "world_size": 4}),
        ]
        for n, name, kwargs, options in wrong:
            what = f"launch_replicas({n}, {name}, {kwargs}, {options})"
            lab.note(what, "launch")
            try:
                lab.within(
                    "L4",
                    lambda n=n,
                    name=name,
                    kwargs=kwargs,
                    options=options: lab.executor.launch_replicas(  # type: ignore[misc]
                        n, name, kwargs, **options
                    ),
                )
            except ValueError:
                continue
            except BackendError as error:
                lab.broken(
                    "L4", f"{what} raised {error!r}", "a wrong argument is an InvalidRequestError"
                )
            lab.broken("L4", f"{what} was launched", "an argument of it is wrong")
        if lab.can(Ability.CALLS) and lab.harness.calls() != calls:
            lab.broken(
                "L4", f"{lab.harness.calls() - calls} calls were made", "all launches were wrong"
            )
        if lab.harness.living() != living:
            lab.broken(
                "L4", "all launches were refused", f"{lab.harness.living() - living} replicas live"
            )

    def test_l5_a_plan_calls_nothing(self, lab: Lab) -> None:
        """Check that a plan also starts nothing."""
        lab.needs(Ability.CALLS)
        calls = lab.harness.calls()
        plan = lab.verb(
            "L5",
            lambda: lab.executor.plan(
                3, lab.harness.entrypoint, {"x": [1]}, timeout=60, run_id="planned"
            ),
        )
        if lab.harness.calls() != calls or lab.harness.living():
            lab.broken(
                "L5", f"plan made {lab.harness.calls() - calls} calls", "a plan calls nothing"
            )
        if plan.run_id != "planned" or not plan.requests:
            lab.broken("L5", repr(plan), "the plan of run 'planned' has its requests")

    def test_l5_a_plan_is_what_is_sent(self, lab: Lab) -> None:
        """Compare the plan with what was sent, request by request."""
        lab.needs(Ability.SENT)
        run_id = f"{lab.harness.run_prefix}-planned"
        kwargs = {**lab.harness.entrypoint_args, "number": 1, **NESTED}
        options: dict[str, Any] = {"timeout": lab.harness.timeout, "run_id": run_id}
        plan = lab.verb(
            "L5", lambda: lab.executor.plan(3, lab.harness.entrypoint, kwargs, **options)
        )
        before = len(lab.harness.sent())
        lab.launch(3, kwargs=NESTED, **options)
        sent = lab.harness.sent()[before:]
        if sent != list(plan.requests):
            where, planned, other = _first_difference(list(plan.requests), sent)
            lab.broken("L5", f"planned{where}: {planned!r}", f"sent{where}: {other!r}")


def _first_difference(one: Any, other: Any) -> tuple[str, Any, Any]:
    """Return where two JSON values differ first, such as ``[0]['name']``, and what is there."""
    places: Any = ()
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        places = range(len(one))
    elif isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            missing = {name: one[name] for name in one if name not in other}
            return "", missing, {name: other[name] for name in other if name not in one}
        places = one
    for place in places:
        if one[place] != other[place]:
            where, planned, sent = _first_difference(one[place], other[place])
            return f"[{place!r}]{where}", planned, sent
    return "", one, other
