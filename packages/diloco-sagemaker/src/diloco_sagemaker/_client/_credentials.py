"""Check the credentials before a request is signed with them.

botocore and http.client fail on some characters with errors that name no credentials, or show them.
"""

from __future__ import annotations

from typing import Any


def check_credentials(events: Any) -> None:
    """Make the clients of these events raise a botocore error for what no credentials can have.

    May be called again with the same events.
    """
    events.register("before-sign", _check, unique_id="diloco-sagemaker-credentials")


def _check(request_signer: Any, **_: Any) -> None:
    from botocore.exceptions import CredentialRetrievalError  # slow to import

    credentials = request_signer._credentials  # noqa: SLF001 - botocore has no other way
    if credentials is None:
        return
    try:
        key, secret, token = credentials.get_frozen_credentials()[:3]
    except (RuntimeError, ValueError) as error:  # still expired when they are new; not UTF-8
        raise CredentialRetrievalError(provider=credentials.method, error_msg=str(error)) from error
    if not all(map(_is_sendable, (key, secret, token or ""))):
        raise CredentialRetrievalError(
            provider=credentials.method,
            error_msg=(
                "one of them is no text, or has a character that cannot be sent, such as a line "
                "end: look at AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or "
                "the same in the profile"
            ),
        )


def _is_sendable(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.isprintable()
