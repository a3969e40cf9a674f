"""The descriptions of functions and apps with which clients and containers can use them."""

from __future__ import annotations

from typing import Any

from modal_proto import api_pb2

from .._workspace._app import App, Function
from .._workspace._call import Call

_FORMATS = (api_pb2.DATA_FORMAT_PICKLE, api_pb2.DATA_FORMAT_CBOR)


def metadata(function: Function) -> Any:
    """Return the contents of a function's handle."""
    app: App = function.app
    return api_pb2.FunctionHandleMetadata(
        app_id=app.app_id,
        function_name=function.name,
        function_type=api_pb2.Function.FUNCTION_TYPE_FUNCTION,
        definition_id=function.definition_id,
        supported_input_formats=_FORMATS,
        supported_output_formats=_FORMATS,
    )


def layout(app: App) -> Any:
    """Return the parts of an app."""
    made = api_pb2.AppLayout(function_ids=app.published)
    for function in app.functions.values():
        if function.function_id in app.published.values():
            made.objects.add(
                object_id=function.function_id, function_handle_metadata=metadata(function)
            )
    return made


def definition(call: Call) -> Any:
    """Return the message that defines the function of a call; None if no client deployed it.

    If it has several definitions, the first choice is returned.
    """
    message = call.function.definition
    if message is None:
        return None
    return min(message.ranked_functions, key=lambda each: each.rank).function


def arguments(call: Call, task_id: str) -> tuple[bytes, list[str]] | None:
    """Return the file of arguments for the entrypoint of a container, and the IDs of its mounts.

    None if no code was deployed for the function.
    """
    function_def = definition(call)
    if function_def is None:
        return None
    function, app = call.function, call.function.app
    base = function.base or function
    made = api_pb2.ContainerArguments(
        task_id=task_id,
        function_id=base.function_id,
        app_id=app.app_id,
        function_def=function_def,
        environment_name=app.environment,
        app_layout=layout(app),
    )
    made.function_def.app_name = app.name
    for dependency in made.function_def.object_dependencies:
        made.app_layout.objects.add(object_id=dependency.object_id)
    return made.SerializeToString(), list(function_def.mount_ids)
