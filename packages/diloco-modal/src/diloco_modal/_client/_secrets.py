"""The Secrets of a launch: those that it names, and those of the app.

Modal itself would replace the app's with the launch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_protocol import BackendError, InvalidRequestError

from ._records import Records


class Secrets(Records):
    """The Secrets of an environment. Safe to share between threads."""

    def _secrets_of(self, function: Any, wanted: Mapping[str, str]) -> list[Any]:
        """Return the Secrets to bind to a function: those of the app, and then those of the launch.

        From version 1.6 on, Modal's client tells which Secrets the app has. With an older one, only
        those in the option ``app_secrets`` are kept.

        Args:
            function: The deployed function, which was looked up before.
            wanted: Names of Secrets by the variable that each must hold.

        Raises:
            InvalidRequestError: A Secret or its key is missing, or the app has one without a name;
                says what to do.
        """
        named = [self._named(name, []) for name in self._options.app_secrets or ()]
        named += [self._named(name, [key]) for key, name in sorted(wanted.items())]
        return [*self._of_app(function, {secret.object_id for secret in named}), *named]

    def _named(self, name: str, keys: list[str]) -> Any:
        import modal

        secret = modal.Secret.from_name(name, required_keys=keys, **self._where)
        try:
            self._ask(secret.hydrate.aio, f"looking for the Secret {name!r}")
        except BackendError as error:
            if error.retryable:
                raise
            raise InvalidRequestError(
                f"{str(error).rstrip('.')}. Make it with all its keys: modal secret create --force "
                f"{name} NAME=VALUE ..."
            ) from error
        return secret

    def _of_app(self, function: Any, known: set[str]) -> list[Any]:
        """Return the Secrets of the app that are not known yet."""
        import modal

        if isinstance(modal.Function.info, property):  # before 1.6, info is something else
            return []
        secret_ids = self._ask(function.info.aio, "looking at the function").secrets
        missing = [secret_id for secret_id in secret_ids if secret_id not in known]
        if not missing:
            return []
        where = self._where
        listed = self._ask(lambda: modal.Secret.objects.list.aio(**where), "listing Secrets")
        by_id = {secret.object_id: secret for secret in listed}
        if nameless := [secret_id for secret_id in missing if secret_id not in by_id]:
            raise InvalidRequestError(
                f"a launch with secrets= would take {len(nameless)} of the app's Secrets away, "
                f"which have no name in this environment ({', '.join(nameless)}): have build_app "
                "use modal.Secret.from_name, and deploy it again"
            )
        return [by_id[secret_id] for secret_id in missing]
