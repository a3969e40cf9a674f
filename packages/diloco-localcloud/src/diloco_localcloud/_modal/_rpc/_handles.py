"""The descriptions of functions and apps with which a client can use them."""

from __future__ import annotations

from typing import Any

from modal_proto import api_pb2

from .._workspace._app import App, Function

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
