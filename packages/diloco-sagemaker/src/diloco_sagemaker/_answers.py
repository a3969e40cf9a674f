"""Every answer is looked at before it is believed: it may be cut, or a proxy's page with status 200.

botocore takes what is missing to be empty, so half a list of jobs, or a page that says "log in",
would be a list of none.
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
"""What the answer to an operation has always, and what each entry of that has."""
_NUMBER = (int, float, str)
"""JSON has no NaN and no infinity, so AWS writes these as text."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "long": (int,), "float": _NUMBER, "double": _NUMBER, "timestamp": (datetime,),
}  # fmt: skip


def check_answers(client: Any) -> None:
    """Have a client of boto3 raise an error of botocore where an answer is cut, or is not AWS's; may be repeated."""
    client.meta.events.register("after-call", _check, unique_id="diloco-sagemaker-answers")


def _check(http_response: Any, parsed: Any, model: Any, **_: Any) -> None:
    from botocore.exceptions import ResponseStreamingError  # slow to import
    from botocore.parsers import ResponseParserError

    if (cut := _cut(http_response, model)) is not None:
        raise ResponseStreamingError(error=cut)
    if http_response.status_code < 300 and (why := _foreign(parsed, model)) is not None:
        if model.has_streaming_output:
            http_response.raw.close()  # nobody will read it
        raise ResponseParserError(f"the answer has no {why}, so it is not AWS's own, or was cut")


def _cut(http_response: Any, model: Any) -> str | None:
    """How much is missing of an answer. What is streamed is checked by botocore itself."""
    headers = http_response.headers
    said = str(headers.get("Content-Length", ""))
    plain = headers.get("Content-Encoding") in {None, "identity"}
    if model.has_streaming_output or not said.isdecimal() or not plain:
        return None
    if model.http.get("method") == "HEAD":
        return None
    came = len(http_response.content)
    return f"{came} of {said} bytes of the answer came" if came < int(said) else None


def _foreign(parsed: Any, model: Any) -> str | None:
    """What an answer lacks that every one of AWS has."""
    # The only thing that an operation tells which has nothing to answer, such as a stop.
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
    """Whether a value has the types of botocore's model, which botocore does not look at in JSON."""
    if shape.type_name == "structure" and not shape.is_document_type:
        return isinstance(value, dict) and all(
            _fits(value[name], member)
            for name, member in shape.members.items()
            if value.get(name) is not None
        )
    if shape.type_name == "list":
        return isinstance(value, list) and all(_fits(each, shape.member) for each in value)
    if shape.type_name == "map":
        return isinstance(value, dict) and all(_fits(each, shape.value) for each in value.values())
    known = _TYPES.get(shape.type_name)
    fits = known is None or isinstance(value, known)
    # These raise for what Python cannot calculate with.
    if fits and shape.type_name == "timestamp":
        value.timestamp()
    elif fits and shape.type_name in {"integer", "long", "float", "double"}:
        float(value)
    return fits
