"""RPCs about Dicts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from modal_proto import api_pb2

from .._workspace._dicts import Dict, Dicts
from .._workspace._refused import RefusedError, not_found
from ._context import Context, Rpcs


class DictOperations(Rpcs):
    """Operations on the Dicts of a workspace.

    A repeated write is done twice, whatever its idempotency key: it is not known what Modal does
    then, and a client has to cope with it.
    """

    @property
    def _dicts(self) -> Dicts:
        return self._workspace.dicts

    def _serve_dict_get_or_create(self, request: Any, _: Context) -> Any:
        environment = self._workspace.environment(request.environment_name)
        kind, name = request.object_creation_type, request.deployment_name
        item = self._dicts.named(environment, name)
        if kind == api_pb2.OBJECT_CREATION_TYPE_EPHEMERAL:
            raise RefusedError("UNIMPLEMENTED", "the stand-in has no Dicts without a name")
        if kind == api_pb2.OBJECT_CREATION_TYPE_CREATE_FAIL_IF_EXISTS or (
            item is None and kind == api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING
        ):
            item = self._dicts.create(environment, name)
        if item is None:
            raise not_found(f"Dict '{name}' not found in environment '{environment}'")
        return api_pb2.DictGetOrCreateResponse(dict_id=item.dict_id, metadata=self._metadata(item))

    def _serve_dict_list(self, request: Any, _: Context) -> Any:
        environment = self._workspace.environment(request.environment_name)
        dicts = self._dicts.listed(environment, request.pagination.created_before)
        most = request.pagination.max_objects or 100
        answer = api_pb2.DictListResponse(environment_name=environment)
        for item in dicts[:most]:
            names = {"name": item.name, "dict_id": item.dict_id, "created_at": item.created}
            answer.dicts.add(metadata=self._metadata(item), **names)
        return answer

    def _serve_dict_delete(self, request: Any, _: Context) -> Any:
        self._dicts.delete(request.dict_id)

    def _serve_dict_update(self, request: Any, _: Context) -> Any:
        if request.if_not_exists and len(request.updates) != 1:
            raise RefusedError("INVALID_ARGUMENT", "if_not_exists is for one entry at a time")
        only_new, place = request.if_not_exists, request.dict_id
        written = [
            self._dicts.put(place, entry.key, entry.value, if_not_exists=only_new)
            for entry in request.updates
        ]
        self._workspace.changed()
        return api_pb2.DictUpdateResponse(created=all(written))

    def _serve_dict_get(self, request: Any, _: Context) -> Any:
        value = self._dicts.get(request.dict_id, request.key)
        return api_pb2.DictGetResponse(found=value is not None, value=value)

    def _serve_dict_pop(self, request: Any, _: Context) -> Any:
        entry = self._dicts.entries(request.dict_id).pop(request.key, None)
        return api_pb2.DictPopResponse(found=entry is not None, value=entry and entry.value)

    def _serve_dict_contains(self, request: Any, _: Context) -> Any:
        contains = self._dicts.get(request.dict_id, request.key) is not None
        return api_pb2.DictContainsResponse(found=contains)

    def _serve_dict_len(self, request: Any, _: Context) -> Any:
        return api_pb2.DictLenResponse(len=len(self._dicts.entries(request.dict_id)))

    async def _serve_dict_contents(self, request: Any, _: Context) -> AsyncIterator[Any]:
        with self._workspace.lock:
            entries = self._dicts.contents(request.dict_id)
        for key, value in entries:
            wanted = {"key": request.keys and key, "value": request.values and value}
            yield api_pb2.DictEntry(**{name: data for name, data in wanted.items() if data})

    def _metadata(self, item: Dict) -> Any:
        created = api_pb2.CreationInfo(created_at=item.created, created_by=self._workspace.name)
        return api_pb2.DictMetadata(name=item.name, creation_info=created)
