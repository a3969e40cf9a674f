"""Resources that are asked of the platform: L10."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diloco_protocol.backend import parse_gpu

from ._harness import Ability
from ._lab import Lab
from ._suite_told import refused
from ._world_hooks import Resources

#: Arguments of a launch, each with what the platform is then to be asked for.
AMOUNTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"cpu": 2}, {"cpu": 2.0}),
    ({"cpu": 1.5}, {"cpu": 1.5}),
    ({"cpu": "500m"}, {"cpu": 0.5}),
    ({"memory": "3Gi"}, {"memory": 3 * 2**30}),
    ({"memory": "700Mi"}, {"memory": 700 * 2**20}),
    ({"spot": True}, {"spot": True}),
    ({"spot": False}, {"spot": False}),
]


class Asking:
    """Fixed tests of L10."""

    def test_l10_what_is_asked_for_is_asked_of_the_platform(self, lab: Lab) -> None:
        """Ask for every amount, model and kind, alone and together.

        What the platform does not have must be refused by plan and launch alike.
        """
        cases = AMOUNTS + [({"gpu": gpu}, {"gpu": gpu}) for gpu in lab.harness.gpus or ("1", "2")]
        taken = [case for case in cases if self._takes(lab, case[0])]
        for wanted in lab.harness.gpus:
            if all(options.get("gpu") != wanted for options, _ in taken):
                lab.broken(
                    "L10", f"gpu={wanted!r} was refused", "the harness says that it is taken"
                )
        if not taken:
            return
        lab.needs(Ability.RESOURCES)
        last = {name: case for case in taken for name in case[0]}  # the last one of each kind
        together: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for options, amounts in last.values():
            together = ({**together[0], **options}, {**together[1], **amounts})
        usual = self._asked(lab, {})[0]
        for options, amounts in [*taken, together]:
            for rank, resources in enumerate(self._asked(lab, options)):
                true = replace(usual, **amounts)
                if _plain(resources) != _plain(true):
                    lab.broken(
                        "L10", f"for rank {rank}, {resources} was asked for", f"it is {true}"
                    )

    def _takes(self, lab: Lab, options: dict[str, Any]) -> bool:
        try:
            lab.within("L10", lambda: lab.executor.plan(1, lab.harness.entrypoint, {}, **options))
        except ValueError:
            refused(lab, "L10", **options)
            return False
        return True

    def _asked(self, lab: Lab, options: dict[str, Any]) -> list[Resources]:
        # The suite does not wait for these replicas: this world may have no such machine.
        run = lab.launch(2, starts=False, **options)
        for replica in run.replicas:
            if lab.harness.truth(replica.handle).state is None:
                lab.broken("L10", f"a launch gave {replica.handle}", "there is no such replica")
        resources = [lab.harness.resources(handle) for handle in run.handles]
        for handle in run.handles[:2]:
            lab.verb("C1", lambda one=handle: lab.executor.cancel(one))  # type: ignore[misc]
        lab.harness.settle()
        return resources


def _plain(resources: Resources) -> tuple[Any, ...]:
    gpu = None if resources.gpu is None else parse_gpu(resources.gpu.lower())
    return resources.cpu, resources.memory, gpu, bool(resources.spot)
