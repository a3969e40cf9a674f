"""The app that is deployed once with ``modal deploy``, before the first launch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from diloco_protocol import InvalidRequestError

from ._client._import import import_modal
from ._request._options import check_function
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
    """Make an app with the function whose calls are replicas, for ``modal deploy``.

    Every call has a container of its own, which ends with it, so that a cancel can end the
    container without harm to other replicas. Modal itself restarts nothing: only the runner does,
    and counts the restarts.

    Args:
        name: Name of the app.
        image: A ``modal.Image`` with ``diloco-modal`` of the launcher's version, and with the
            trainer.
        gpu: The GPU to use if a launch names none.
        secrets: ``modal.Secret`` objects whose variables all replicas have. A launch with
            ``secrets=`` keeps those that have a name; with a client of Modal before 1.6 only if
            their names are given to the executor (``app_secrets=``).
        volumes: ``modal.Volume`` objects by path.
        function: Name of the function.
        **options: Further arguments of ``modal.App.function``, such as ``region``.

    Returns:
        A ``modal.App``; not deployed.

    Raises:
        InvalidRequestError: One of the options is set by this function and must not be changed.
    """
    own = {"retries": 0, "single_use_containers": True}
    if taken := sorted(own.keys() & options.keys()):
        raise InvalidRequestError(
            f"build_app sets {', '.join(taken)} of the function itself, so that a cancel ends one "
            "replica only, and only the runner starts one again: leave it out"
        )
    check_function("function", function)
    modal = import_modal()  # importing it is slow
    app = modal.App(name, include_source=False)
    chosen = {"timeout": 3600, **options, **own, "name": function, "gpu": gpu, "image": image}
    app.function(secrets=list(secrets), volumes=dict(volumes or {}), **chosen)(run_replica)
    return app
