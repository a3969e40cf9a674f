"""Refusals, in the words of the API server."""

from __future__ import annotations

from typing import Any

from ._resources import Resource

Json = dict[str, Any]


class ApiError(Exception):
    """A refusal: an HTTP status and a Status object."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Json | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.headers = headers or {}
        self.body: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            **({"reason": reason} if reason else {}),
            **({"details": details} if details else {}),
            "code": code,
        }


def _about(resource: Resource, name: str) -> Json:
    """Return the details of a Status about an object, or about a collection of them."""
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    return {key: value for key, value in details.items() if value}


def not_found(resource: Resource, name: str) -> ApiError:
    """Return 404 for an object."""
    message = f'{resource.qualified} "{name}" not found'
    return ApiError(404, "NotFound", message, _about(resource, name))


def no_such_path(method: str, path: str) -> ApiError:
    """Return 404 for a path that no API serves; the real server's message is less plain."""
    message = (
        "the server could not find the requested resource: "
        f"the stand-in does not serve {method} {path}"
    )
    return ApiError(404, "NotFound", message, {})


def already_exists(resource: Resource, name: str, *, deleting: bool = False) -> ApiError:
    """Return 409 for a create of an object that exists, or is still being deleted."""
    message = f'{resource.qualified} "{name}" already exists'
    message = f"object is being deleted: {message}" if deleting else message
    return ApiError(409, "AlreadyExists", message, _about(resource, name))


def being_terminated(resource: Resource, name: str, namespace: str) -> ApiError:
    """Return 403 for a create in a namespace that is being deleted."""
    cause = {
        "reason": "NamespaceTerminating",
        "message": f"namespace {namespace} is being terminated",
        "field": "metadata.namespace",
    }
    message = (
        f'{resource.qualified} "{name}" is forbidden: unable to create new content '
        f"in namespace {namespace} because it is being terminated"
    )
    return ApiError(403, "Forbidden", message, {**_about(resource, name), "causes": [cause]})


_MODIFIED = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


def conflict(resource: Resource, name: str, cause: str = _MODIFIED) -> ApiError:
    """Return 409 for an update or a failed precondition."""
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {cause}'
    return ApiError(409, "Conflict", message, _about(resource, name))


def invalid(resource: Resource, name: str, causes: list[tuple[str, str, str]]) -> ApiError:
    """Return 422; a cause is (field, reason such as FieldValueInvalid, message)."""
    texts = [f"{field}: {message}" for field, _, message in causes]
    listed = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    items = [{"reason": reason, "message": words, "field": at} for at, reason, words in causes]
    details = {**_about(resource, name), "kind": resource.kind, "causes": items}
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {listed}', details)


def bad_request(message: str) -> ApiError:
    """Return 400 with a message."""
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    """Return 401."""
    return ApiError(401, "Unauthorized", "Unauthorized")


def too_large(limit: int) -> ApiError:
    """Return 413 for a body above the limit."""
    message = f"Request entity too large: limit is {limit}"
    return ApiError(413, "RequestEntityTooLarge", message)


def method_not_allowed() -> ApiError:
    """Return 405."""
    message = "the server does not allow this method on the requested resource"
    return ApiError(405, "MethodNotAllowed", message, {})


def unsupported_media_type(allowed: list[str]) -> ApiError:
    """Return 415 for a body of another media type than the allowed ones, or of none."""
    message = (
        "the body of the request was in an unknown format - accepted media types include: "
        f"{', '.join(allowed)}"
    )
    return ApiError(415, "UnsupportedMediaType", message, {})


def internal_error(message: str) -> ApiError:
    """Return 500 with a message."""
    details = {"causes": [{"message": message}]}
    return ApiError(500, "InternalError", f"Internal error occurred: {message}", details)


def too_many_requests(seconds: int) -> ApiError:
    """Return 429 with Retry-After."""
    message, details = "Too many requests, please try again later.", {"retryAfterSeconds": seconds}
    return ApiError(429, "TooManyRequests", message, details, {"Retry-After": str(seconds)})


def gone(message: str) -> ApiError:
    """Return 410 for a continue token or a resource version that is too old."""
    return ApiError(410, "Expired", message)


def forbidden(
    user: str, verb: str, resource: Resource, namespace: str, name: str, subresource: str = ""
) -> ApiError:
    """Return the authorizer's 403."""
    what = f"{resource.plural}/{subresource}" if subresource else resource.plural
    subject = f'{resource.qualified} "{name}"' if name else resource.qualified
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    message = (
        f'{subject} is forbidden: User "{user}" cannot {verb} resource "{what}" '
        f'in API group "{resource.group}" {where}'
    )
    return ApiError(403, "Forbidden", message, _about(resource, name))


def success(resource: Resource, name: str, uid: str) -> Json:
    """Return the Status that answers a delete which removed the object."""
    details = {**_about(resource, name), "uid": uid}
    answer = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return {**answer, "details": details}


class AdmissionError(Exception):
    """The reason why a pod is refused: the part of the message after ``pods "x" is forbidden:``."""
