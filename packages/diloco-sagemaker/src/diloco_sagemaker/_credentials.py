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

    held = request_signer._credentials  # noqa: SLF001 - botocore has no other way
    texts = () if held is None else held.get_frozen_credentials()[:3]
    if not all(text.isascii() and text.isprintable() for text in texts if text):
        raise CredentialRetrievalError(
            provider=held.method,
            error_msg=(
                "one of them has a character that cannot be sent, such as a line end: look at "
                "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the same in "
                "the profile"
            ),
        )
