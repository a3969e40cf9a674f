"""Answers that were cut on their way are refused: botocore takes one in JSON that ends early to be an empty one."""

from __future__ import annotations

from typing import Any


def refuse_cut_answers(client: Any) -> None:
    """Have a client of boto3 raise an error of botocore where an answer is shorter than it says; may be repeated.

    Without this, half a list of jobs is a list of none. What is streamed is checked by botocore itself.
    """
    client.meta.events.register("after-call", _check, unique_id="diloco-sagemaker-whole")


def _check(http_response: Any, model: Any, **_: Any) -> None:
    from botocore.exceptions import ResponseStreamingError  # slow to import

    headers = http_response.headers
    said = str(headers.get("Content-Length", ""))
    plain = headers.get("Content-Encoding") in {None, "identity"}
    if model.has_streaming_output or not said.isdecimal() or not plain:
        return
    if model.http.get("method") == "HEAD":
        return
    came = len(http_response.content)
    if came < int(said):
        raise ResponseStreamingError(error=f"{came} of {said} bytes of the answer came")
