"""Check a request against botocore's model of the service before anything is sent.

The client makes the same check with every call, and a plan makes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from diloco_protocol import InvalidRequestError, MissingDependencyError
from diloco_protocol.backend import redact_and_cut

_LONGEST = 2000  # characters of what is wrong


def check_request(request: Mapping[str, Any]) -> None:
    """Refuse a request with fields that the service does not have, or with values of other types.

    The service itself refuses the rest (patterns, lengths, unknown types of instances) by name when
    the first job is created, which is created alone.

    Raises:
        InvalidRequestError: Names all that is wrong.
    """
    validator, shape = _validator_and_shape()
    report = validator.validate(request, shape)
    if report.has_errors():
        wrong = redact_and_cut(report.generate_report(), _LONGEST)
        raise InvalidRequestError(f"a training job cannot be asked for like this: {wrong}")


def missing_boto3(error: ImportError) -> MissingDependencyError:
    """Return the error for an installation without boto3."""
    return MissingDependencyError(f"{error}: run `pip install boto3`")


@cache
def _validator_and_shape() -> tuple[Any, Any]:
    try:
        from botocore.loaders import Loader  # slow to import
        from botocore.model import ServiceModel
        from botocore.validate import ParamValidator
    except ImportError as error:
        raise missing_boto3(error) from error
    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
    return ParamValidator(), model.operation_model("CreateTrainingJob").input_shape
