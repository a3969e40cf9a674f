"""The app that ``modal deploy`` puts in place, once, before the first launch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ._wrapper import run_replica


def build_app(
    name: str = "diloco",
    *,
    image: Any = None,
    gpu: str | None = None,
    secrets: Collection[Any] = (),
    volumes: Mapping[str, Any] | None = None,
    function: str = "replica",
    **options: Any,
) -> Any:
    """An app with the function whose calls are replicas, for ``modal deploy``.

    Every call has a container of its own, which ends with it, so that a cancel can end the container and harm no other replica.
    Modal starts nothing again by itself: restarts are counted by the runner.

    Args:
        name: Name of the app.
        image: A ``modal.Image`` with ``diloco-modal`` of the launcher's version, and with the trainer.
        gpu: The GPU where a launch names none.
        secrets: ``modal.Secret`` objects whose variables all replicas have. A launch with ``secrets=`` replaces them, unless
            their names are given to the executor (``app_secrets=``).
        volumes: ``modal.Volume`` objects by path.
        function: Name of the function.
        **options: Further arguments of ``modal.App.function``, such as ``region``.

    Returns:
        A ``modal.App``; not deployed.
    """
    import modal  # slow to import

    app = modal.App(name, include_source=False)
    chosen: dict[str, Any] = {
        "image": image,
        "gpu": gpu,
        "secrets": list(secrets),
        "volumes": dict(volumes or {}),
        "timeout": 3600,
        **options,
        "name": function,
        "retries": 0,
        "single_use_containers": True,
    }
    app.function(**chosen)(run_replica)
    return app
