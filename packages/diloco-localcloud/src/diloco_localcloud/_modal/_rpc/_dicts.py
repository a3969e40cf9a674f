"""RPCs about Dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modal_proto import api_pb2

from .._workspace._refused import RefusedError, not_found

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from .._workspace._dicts import Dict
    from .._workspace._workspace import Workspace
    from ._context import Context


class DictOperations:
    """Operations on the Dicts of a workspace.

    A repeated write is done twice, whatever its idempotency key: it is not known what Modal does
    then, and a client has to cope with it.

    Attributes:
        operations: by the name of the RPC; called under the lock of the workspace.
        streams: by the name of the RPC; iterators that take the lock themselves.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._dicts = workspace.dicts
        self.operations: Mapping[str, Callable[[Any, Context], Any]] = {
            "DictClear": self._clear,
            "DictContains": self._contains,
            "DictDelete": self._delete,
            "DictGet": self._get,
            "DictGetById": self._get_by_id,
            "DictGetOrCreate": self._get_or_create,
            "DictHeartbeat": self._heartbeat,
            "DictLen": self._len,
            "DictList": self._list,
            "DictPop": self._pop,
            "DictUpdate": self._update,
        }
        self.streams: Mapping[str, Callable[[Any, Context], Any]] = {"DictContents": self._contents}

    def _get_or_create(self, asked: Any, _: Context) -> Any:
        environment = self._workspace.environment(asked.environment_name)
        kind, name = asked.object_creation_type, asked.deployment_name
        held = self._dicts.named(environment, name)
        if kind in (
            api_pb2.OBJECT_CREATION_TYPE_CREATE_FAIL_IF_EXISTS,
            api_pb2.OBJECT_CREATION_TYPE_EPHEMERAL,
        ) or (held is None and kind == api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING):
            held = self._dicts.create(environment, name)
        if held is None:
            raise not_found(f"Dict '{name}' not found in environment '{environment}'")
        return api_pb2.DictGetOrCreateResponse(dict_id=held.dict_id, metadata=self._metadata(held))

    def _get_by_id(self, asked: Any, _: Context) -> Any:
        held = self._dicts.by_id(asked.dict_id)
        return api_pb2.DictGetByIdResponse(dict_id=held.dict_id, metadata=self._metadata(held))

    def _heartbeat(self, asked: Any, _: Context) -> Any:
        self._dicts.by_id(asked.dict_id)

    def _list(self, asked: Any, _: Context) -> Any:
        environment = self._workspace.environment(asked.environment_name)
        held = self._dicts.listed(environment, asked.pagination.created_before)
        most = asked.pagination.max_objects or 100
        answer = api_pb2.DictListResponse(environment_name=environment)
        for each in held[:most]:
            answer.dicts.add(
                name=each.name,
                created_at=each.created,
                dict_id=each.dict_id,
                metadata=self._metadata(each),
            )
        return answer

    def _delete(self, asked: Any, _: Context) -> Any:
        self._dicts.delete(asked.dict_id)

    def _update(self, asked: Any, _: Context) -> Any:
        if asked.if_not_exists and len(asked.updates) != 1:
            raise RefusedError("INVALID_ARGUMENT", "if_not_exists is for one entry at a time")
        written = [
            self._dicts.put(
                asked.dict_id, entry.key, entry.value, if_not_exists=asked.if_not_exists
            )
            for entry in asked.updates
        ]
        self._workspace.changed()
        return api_pb2.DictUpdateResponse(created=all(written))

    def _get(self, asked: Any, _: Context) -> Any:
        value = self._dicts.get(asked.dict_id, asked.key)
        return api_pb2.DictGetResponse(found=value is not None, value=value)

    def _pop(self, asked: Any, _: Context) -> Any:
        value = self._dicts.pop(asked.dict_id, asked.key)
        return api_pb2.DictPopResponse(found=value is not None, value=value)

    def _contains(self, asked: Any, _: Context) -> Any:
        found = self._dicts.get(asked.dict_id, asked.key) is not None
        return api_pb2.DictContainsResponse(found=found)

    def _len(self, asked: Any, _: Context) -> Any:
        return api_pb2.DictLenResponse(len=self._dicts.count(asked.dict_id))

    def _clear(self, asked: Any, _: Context) -> Any:
        self._dicts.clear(asked.dict_id)

    async def _contents(self, asked: Any, _: Context) -> AsyncIterator[Any]:
        with self._workspace.lock:
            held = self._dicts.contents(asked.dict_id)
        for key, value in held:
            yield api_pb2.DictEntry(
                key=key if asked.keys else b"", value=value if asked.values else b""
            )

    def _metadata(self, held: Dict) -> Any:
        created = api_pb2.CreationInfo(created_at=held.created, created_by=self._workspace.name)
        return api_pb2.DictMetadata(name=held.name, creation_info=created)
