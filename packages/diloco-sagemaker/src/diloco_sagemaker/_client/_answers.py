"""Check every answer before it is used: it may be cut, or be a proxy's page with status 200.

botocore takes missing fields to be empty, so half a list of jobs, or a page that says "log in",
would count as an empty list.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

_ALWAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "CreateTrainingJob": {"TrainingJobArn": ()},
    "DescribeTrainingJob": {
        "TrainingJobName": (), "TrainingJobArn": (), "TrainingJobStatus": (), "CreationTime": (),
    },
    "ListTrainingJobs": {
        "TrainingJobSummaries": ("TrainingJobName", "TrainingJobStatus", "CreationTime"),
    },
    "ListTags": {"Tags": ("Key", "Value")},
    "DescribeLogStreams": {"logStreams": ("logStreamName", "creationTime")},
    "GetLogEvents": {"events": (), "nextForwardToken": (), "nextBackwardToken": ()},
    "GetObject": {"LastModified": ()},
    "ListObjectsV2": {"IsTruncated": ()},
    "GetCallerIdentity": {"Account": (), "Arn": ()},
    "SimulatePrincipalPolicy": {"EvaluationResults": ("EvalDecision",)},
    "DescribeImages": {"imageDetails": ()},
    "ListServiceQuotas": {"Quotas": ()},
}  # fmt: skip
"""The fields that the answer to an operation always has, and the fields of their entries."""
_NUMBER = (int, float, str)
"""Types of a number: JSON has no NaN and no infinity, so AWS writes these as text."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "long": (int,), "float": _NUMBER, "double": _NUMBER,
    "timestamp": (datetime,),
}  # fmt: skip


def check_answers(client: Any) -> None:
    """Make a boto3 client raise a botocore error for an answer that is cut or not from AWS."""
    client.meta.events.register("after-call", _check, unique_id="diloco-sagemaker-answers")


def _check(http_response: Any, parsed: Any, model: Any, **_: Any) -> None:
    from botocore.parsers import ResponseParserError

    if http_response.status_code < 300 and (why := _foreign(parsed, model)) is not None:
        if model.has_streaming_output:
            http_response.raw.close()  # its content will not be read
        raise ResponseParserError(f"the answer has no {why}, so it is not AWS's own, or was cut")


def _foreign(parsed: Any, model: Any) -> str | None:
    """Return what an answer lacks although every answer of AWS has it; None if it lacks nothing."""
    # An operation without output, such as a stop, answers with nothing but this.
    if not (parsed.get("ResponseMetadata") or {}).get("RequestId"):
        return "request id"
    shape = model.output_shape
    if shape is not None and not _fits(parsed, shape):
        return f"form of {shape.name}"
    for field, of_entry in _ALWAYS.get(model.name, {}).items():
        if parsed.get(field) in (None, ""):
            return field
        for entry in parsed[field] if of_entry else ():
            if missing := [name for name in of_entry if name not in entry]:
                return f"{missing[0]} in an entry of {field}"
    return None


def _fits(value: Any, shape: Any) -> bool:
    """Return whether a value has the types of botocore's model.

    botocore itself does not check them in JSON.
    """
    if shape.type_name == "structure" and not shape.is_document_type:
        return isinstance(value, dict) and all(
            _fits(value[name], member)
            for name, member in shape.members.items()
            if value.get(name) is not None
        )
    if shape.type_name == "list":
        return isinstance(value, list) and all(_fits(item, shape.member) for item in value)
    if shape.type_name == "map":
        return isinstance(value, dict) and all(_fits(item, shape.value) for item in value.values())
    known = _TYPES.get(shape.type_name)
    fits = known is None or isinstance(value, known)
    # These calls raise an error for values that Python cannot calculate with.
    if fits and shape.type_name == "timestamp":
        value.timestamp()
    elif fits and shape.type_name in {"integer", "long", "float", "double"}:
        float(value)
    return fits
