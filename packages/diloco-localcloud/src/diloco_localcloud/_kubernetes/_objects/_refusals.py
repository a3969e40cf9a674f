"""Refusals, in the words of the API server."""

from __future__ import annotations

from typing import Any

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


def qualified(resource: str, group: str) -> str:
    """Return ``jobs.batch``, or ``pods`` in the core group."""
    return f"{resource}.{group}" if group else resource


def _details(resource: str, group: str, name: str) -> Json:
    return {
        key: value for key, value in (("name", name), ("group", group), ("kind", resource)) if value
    }


def not_found(resource: str, group: str, name: str) -> ApiError:
    """Return 404 for an object."""
    message = f'{qualified(resource, group)} "{name}" not found'
    return ApiError(404, "NotFound", message, _details(resource, group, name))


def no_such_path(method: str, path: str) -> ApiError:
    """Return 404 for a path that no API serves; the real server's message is less plain."""
    message = (
        "the server could not find the requested resource: "
        f"the stand-in does not serve {method} {path}"
    )
    return ApiError(404, "NotFound", message, {})


def already_exists(resource: str, group: str, name: str) -> ApiError:
    """Return 409 for a create of an object that exists."""
    message = f'{qualified(resource, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _details(resource, group, name))


def being_deleted(resource: str, group: str, name: str) -> ApiError:
    """Return 409 for a create while the old object is being deleted."""
    message = f'object is being deleted: {qualified(resource, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _details(resource, group, name))


def being_terminated(resource: str, group: str, name: str, namespace: str) -> ApiError:
    """Return 403 for a create in a namespace that is being deleted."""
    cause = {
        "reason": "NamespaceTerminating",
        "message": f"namespace {namespace} is being terminated",
        "field": "metadata.namespace",
    }
    message = (
        f'{qualified(resource, group)} "{name}" is forbidden: unable to create new content '
        f"in namespace {namespace} because it is being terminated"
    )
    return ApiError(
        403, "Forbidden", message, {**_details(resource, group, name), "causes": [cause]}
    )


def conflict(resource: str, group: str, name: str, cause: str | None = None) -> ApiError:
    """Return 409 for an update or a failed precondition."""
    cause = (
        cause
        or "the object has been modified; please apply your changes to the latest version "
        "and try again"
    )
    message = f'Operation cannot be fulfilled on {qualified(resource, group)} "{name}": {cause}'
    return ApiError(409, "Conflict", message, _details(resource, group, name))


def invalid(kind: str, group: str, name: str, causes: list[tuple[str, str, str]]) -> ApiError:
    """Return 422; a cause is (field, reason such as FieldValueInvalid, message)."""
    texts = [f"{field}: {message}" for field, _, message in causes]
    listed = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    details = {
        **_details(kind, group, name),
        "causes": [
            {"reason": reason, "message": message, "field": field}
            for field, reason, message in causes
        ],
    }
    return ApiError(
        422, "Invalid", f'{qualified(kind, group)} "{name}" is invalid: {listed}', details
    )


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


def unsupported_media_type(media_type: str, allowed: list[str]) -> ApiError:
    """Return 415 for a body of another media type than the allowed ones."""
    message = (
        "the body of the request was in an unknown format - accepted media types include: "
        f"{', '.join(allowed)}"
    )
    return ApiError(
        415,
        "UnsupportedMediaType",
        message if media_type else "the body of the request has no content type",
        {},
    )


def internal_error(message: str) -> ApiError:
    """Return 500 with a message."""
    details = {"causes": [{"message": message}]}
    return ApiError(500, "InternalError", f"Internal error occurred: {message}", details)


def too_many_requests(seconds: int) -> ApiError:
    """Return 429 with Retry-After."""
    message = "Too many requests, please try again later."
    return ApiError(
        429,
        "TooManyRequests",
        message,
        {"retryAfterSeconds": seconds},
        {"Retry-After": str(seconds)},
    )


def gone(message: str) -> ApiError:
    """Return 410 for a continue token or a resource version that is too old."""
    return ApiError(410, "Expired", message)


def forbidden(
    user: str,
    verb: str,
    resource: str,
    group: str,
    namespace: str,
    name: str,
    subresource: str = "",
) -> ApiError:
    """Return the authorizer's 403."""
    what = f"{resource}/{subresource}" if subresource else resource
    subject = f'{qualified(resource, group)} "{name}"' if name else qualified(resource, group)
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    message = (
        f'{subject} is forbidden: User "{user}" cannot {verb} resource "{what}" '
        f'in API group "{group}" {where}'
    )
    return ApiError(403, "Forbidden", message, _details(resource, group, name))


def success(resource: str, group: str, name: str, uid: str) -> Json:
    """Return the Status that answers a delete which removed the object."""
    details = {**_details(resource, group, name), "uid": uid}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": details,
    }
