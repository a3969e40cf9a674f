"""A Dict that a test reads and writes."""

from __future__ import annotations

import pickle
from typing import Any

from .._workspace._workspace import Workspace


class ScriptedDict:
    """A Dict, with the same entries that programs in containers and all clients see.

    The values are unpickled here, so their writer can run code in the test. Thread-safe.
    """

    def __init__(self, workspace: Workspace, dict_id: str) -> None:
        self._workspace = workspace
        self._id = dict_id

    def put(self, key: Any, value: Any, *, skip_if_exists: bool = False) -> bool:
        """Write an entry; return False if ``skip_if_exists`` keeps an older one."""
        data = pickle.dumps(value, 4)
        with self._workspace.lock:
            written = self._workspace.dicts.put(
                self._id, pickle.dumps(key, 4), data, if_not_exists=skip_if_exists
            )
            self._workspace.changed()
            return written

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key; the default if there is none."""
        with self._workspace.lock:
            data = self._workspace.dicts.get(self._id, pickle.dumps(key, 4))
        return default if data is None else pickle.loads(data)

    def pop(self, key: Any) -> Any:
        """Take an entry out and return its value; None if there is none."""
        with self._workspace.lock:
            data = self._workspace.dicts.pop(self._id, pickle.dumps(key, 4))
        return None if data is None else pickle.loads(data)

    def items(self) -> dict[Any, Any]:
        """Return all entries, in the order in which they were first written."""
        with self._workspace.lock:
            entries = self._workspace.dicts.contents(self._id)
        return {pickle.loads(key): pickle.loads(value) for key, value in entries}
