"""The service models that botocore ships: operations and the shapes of their requests."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..._server._errors import StandInError

if TYPE_CHECKING:
    from botocore.model import ServiceModel


@functools.cache
def load(name: str) -> ServiceModel:
    """Return the model of a service, such as ``sagemaker``; it is read once per process.

    Raises:
        StandInError: botocore is not installed, or is too old to know the service.
    """
    try:
        from botocore.exceptions import UnknownServiceError
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError:
        raise StandInError(
            "the stand-ins of AWS need packages that are not here; "
            "install diloco-localcloud with its extra: diloco-localcloud[aws]"
        ) from None
    try:
        return ServiceModel(Loader().load_service_model(name, "service-2"), name)
    except UnknownServiceError as wrong:
        raise StandInError(f"this version of botocore has no model of {name}: {wrong}") from None
