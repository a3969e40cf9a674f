"""The arguments that Modal's worker hands to a container when it starts it."""

from __future__ import annotations

from modal_proto import api_pb2

from .._workspace._call import Call
from ._containers import definition
from ._handles import layout


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
