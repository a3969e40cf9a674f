"""Starting replicas, and finding them again: L1 to L6, H1 to H3."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from diloco_protocol import BackendError

from ._check_collect import collect
from ._harness import Ability, Fault, Operation, Step
from ._lab import Lab
from ._scenes import conflicting_launch, doubtful_launch, failing_launch

NESTED: dict[str, Any] = {
    "nothing": None,
    "flag": True,
    "number": -17,
    "large": 2**60 + 1,
    "tenth": 0.1,
    "tiny": 5e-324,
    "text": "naïve 漢字 🙂 $HOME $(HOME) $$ `x` \"quoted\" 'single' \\ \n\t end",
    "empty": [{}, [], ""],
    "deep": {"a": {"b": [{"c": [1, [2, [3.5, None]]]}]}},
    "long": "x" * 3000,
}

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
)
json_values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


class Launching:
    """Fixed tests of L1 to L6 and H1 to H3."""

    def test_l1_handles_are_distinct(self, lab: Lab) -> None:
        """Within a run, and among runs that were launched in the same second and not named."""
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
        """Refused at the first call, and at later ones."""
        lab.needs(Operation.LAUNCH, Fault.FORBIDDEN)
        for after in range(4):
            failing_launch(lab, after)

    def test_l3_the_same_run_id_is_the_same_run(self, lab: Lab) -> None:
        """Launched again at once, when it runs, when it has ended, by another process."""
        run = lab.launch(2)
        for what in ("start", "end", "forget"):
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

    def test_l3_another_launch_under_the_same_run_id_is_refused(self, lab: Lab) -> None:
        """And changes nothing."""
        run = lab.up(2)
        for n, more in ((3, {}), (1, {}), (2, {"other": 1})):
            conflicting_launch(lab, run, n, more)
        lab.observe_all()

    def test_l3_a_launch_whose_answer_is_lost_is_found_again(self, lab: Lab) -> None:
        """No replica is started twice, none is left behind."""
        lab.needs(Operation.LAUNCH, Fault.AMBIGUOUS)
        for after in range(3):
            run = doubtful_launch(lab, after)
            lab.observe_all()
            lab.cancel(run.replicas[0])
        lab.settle()
        lab.observe_all()

    def test_l4_wrong_arguments_are_refused_before_anything_is_called(self, lab: Lab) -> None:
        """With an error that is a ValueError."""
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
        """And starts nothing."""
        lab.needs(Ability.CALLS)
        calls = lab.harness.calls()
        plan = lab.within(
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
        """Request by request."""
        lab.needs(Ability.SENT)
        run_id = f"{lab.harness.run_prefix}-planned"
        kwargs = {**lab.harness.entrypoint_args, "number": 1, **NESTED}
        options: dict[str, Any] = {"timeout": lab.harness.timeout, "run_id": run_id}
        plan = lab.within(
            "L5", lambda: lab.executor.plan(3, lab.harness.entrypoint, kwargs, **options)
        )
        before = len(lab.harness.sent())
        lab.launch(3, kwargs=NESTED, **options)
        sent = lab.harness.sent()[before:]
        if sent != list(plan.requests):
            lab.broken("L5", f"planned: {plan.requests}", f"sent: {sent}")

    def test_l6_replicas_are_told_who_they_are(self, lab: Lab) -> None:
        """Rank, world size and exactly the arguments, nested as they are."""
        lab.needs(Ability.TOLD)
        run = lab.up(3, kwargs=NESTED, env={"CONFORMANCE": "a b'c\"$(d)$$e"})
        for replica in run.replicas:
            self._told(lab, replica.handle, {**lab.harness.entrypoint_args, **run.kwargs})
            told = lab.harness.told(replica.handle).environment
            wanted = {
                "REPLICA_RANK": str(replica.handle.rank),
                "REPLICA_WORLD_SIZE": "3",
                "CONFORMANCE": "a b'c\"$(d)$$e",
            }
            if wanted.items() - told.items():
                lab.broken(
                    "L6",
                    f"its environment has {[(key, told.get(key)) for key in wanted]}",
                    str(wanted),
                )

    def test_l6_any_arguments_arrive(self, lab: Lab) -> None:
        """Whatever JSON can say."""
        lab.needs(Ability.TOLD)

        @settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(
            kwargs=st.dictionaries(st.sampled_from(["a", "b", "ü", "x1"]), json_values, max_size=3)
        )
        def arrive(kwargs: dict[str, Any]) -> None:
            run = lab.up(1, kwargs=kwargs)
            self._told(lab, run.handles[0], {**lab.harness.entrypoint_args, **run.kwargs})
            lab.drive(run.replicas[0], Step.SUCCEED, kwargs)
            collect(lab, run.replicas)
            lab.history.clear()

        arrive()

    examples: int = 40

    def _told(self, lab: Lab, handle: Any, kwargs: dict[str, Any]) -> None:
        told = lab.harness.told(handle)
        if (told.rank, told.world_size) != (handle.rank, handle.world_size):
            lab.broken(
                "L6", f"it is told that it is {told.rank} of {told.world_size}", f"it is {handle}"
            )
        if repr(sorted(told.kwargs.items())) != repr(sorted(kwargs.items())):
            lab.broken("L6", f"it is told {told.kwargs!r}", f"it was given {kwargs!r}")

    def test_h1_handles_survive_json(self, lab: Lab) -> None:
        """And mean the same afterwards."""
        run = lab.up(2)
        lab.forget()
        lab.observe_all()
        lab.drive(run.replicas[0], Step.SUCCEED, 1)
        lab.forget()
        lab.observe_all()
        if len(dict.fromkeys([*run.handles, *run.handles], 1)) != 2:
            lab.broken(
                "H1",
                f"{run.handles} are not keys of a dict",
                "a handle is hashable and equal by value",
            )

    def test_h2_another_process_knows_as_much(self, lab: Lab) -> None:
        """At every stage of a life."""
        run = lab.launch(3)
        lab.forget()
        lab.observe_all()
        for replica in run.replicas:
            lab.drive(replica, Step.START)
        lab.forget()
        lab.observe_all()
        lab.drive(run.replicas[0], Step.SUCCEED, "x")
        lab.cancel(run.replicas[1])
        lab.forget()
        lab.observe_all()
        lab.settle()
        lab.forget()
        collect(lab, run.replicas)
        lab.observe_all()

    def test_h3_runs_are_found_again(self, lab: Lab) -> None:
        """By name, with the same handles, whether they live or not."""
        runs = [lab.up(2), lab.up(1, named=False), lab.launch(3)]
        lab.drive(runs[1].replicas[0], Step.FAIL, 1)
        for _ in range(2):
            for run in runs:
                lab.attach(run)
            lab.forget()
        lab.observe_all()
