"""The service models that botocore ships: operations and the shapes of their requests."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..._server._errors import StandInError

Json = dict[str, Any]


@dataclass(frozen=True)
class Service:
    """One service of AWS.

    Attributes:
        name: botocore's name for it, such as ``sagemaker``.
        shapes: the shapes by name.
        operations: the operations by name.
    """

    name: str
    shapes: Json
    operations: Json

    def input(self, operation: str) -> str | None:
        """Return the name of the shape of an operation's request; None if it takes nothing."""
        name = self.operations[operation].get("input", {}).get("shape")
        return None if name is None else str(name)


@functools.cache
def load(name: str) -> Service:
    """Return a service's model; it is read once per process.

    Raises:
        StandInError: botocore is not installed, or is too old to know the service.
    """
    try:
        from botocore.exceptions import UnknownServiceError
        from botocore.loaders import Loader
    except ImportError:
        raise StandInError(
            "the stand-ins of AWS need packages that are not here; "
            "install diloco-localcloud with its extra: diloco-localcloud[aws]"
        ) from None
    try:
        model = Loader().load_service_model(name, "service-2")
    except UnknownServiceError as wrong:
        raise StandInError(f"this version of botocore has no model of {name}: {wrong}") from None
    return Service(name, model["shapes"], model["operations"])
