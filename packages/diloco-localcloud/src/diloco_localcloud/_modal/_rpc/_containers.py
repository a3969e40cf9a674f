"""RPCs of containers: those that they send, and those that clients send about them."""

from __future__ import annotations

from typing import Any

from modal_proto import api_pb2

from .._workspace._call import Call, Life, Payload, Result, Status
from .._workspace._refused import RefusedError, not_found
from ._context import Context, Rpcs
from ._handles import definition

# A heartbeat with no news is answered after this long; the container gives it up after 15 s.
_HEARTBEAT_SECONDS = 10.0


class Containers(Rpcs):
    """Operations of containers and on them. Each container has one input, and ends with it."""

    def _serve_container_hello(self, _: Any, context: Context) -> None:
        self._life(context)

    def _serve_volume_commit(self, _: Any, context: Context) -> Any:
        self._life(context)
        return api_pb2.VolumeCommitResponse()

    async def _serve_container_heartbeat(self, _: Any, context: Context) -> Any:
        def cancelled() -> Any:
            call, life = self._life(context)
            if not (life.cancelled and life.fetched):
                return None
            life.cancelled = False
            cancel_event = api_pb2.CancelInputEvent(input_ids=[call.input_id])
            return api_pb2.ContainerHeartbeatResponse(cancel_input_event=cancel_event)

        answer = await self._until(_HEARTBEAT_SECONDS, cancelled)
        return answer or api_pb2.ContainerHeartbeatResponse()

    def _serve_function_get_inputs(self, _: Any, context: Context) -> Any:
        call, life = self._life(context)
        answer = api_pb2.FunctionGetInputsResponse()
        # One input for each container, whatever the definition says: then a container that has to
        # end takes no other input with it.
        if life.fetched or call.result is not None:
            answer.inputs.add(kill_switch=True)
            return answer
        self._workspace.calls.fetch(call, life)
        function_input = api_pb2.FunctionInput(data_format=call.payload.form)
        if call.payload.blob:
            function_input.args_blob_id = call.payload.blob
        else:
            function_input.args = call.payload.data
        answer.inputs.add(
            input_id=call.input_id,
            input=function_input,
            function_call_id=call.call_id,
            function_call_invocation_type=api_pb2.FUNCTION_CALL_INVOCATION_TYPE_ASYNC,
            retry_count=len(call.lives) - 1,
        )
        return answer

    def _serve_function_get_serialized(self, _: Any, context: Context) -> Any:
        function = definition(self._life(context)[0])
        return api_pb2.FunctionGetSerializedResponse(
            function_serialized=function.function_serialized,
            class_serialized=function.class_serialized,
        )

    def _serve_function_put_outputs(self, request: Any, context: Context) -> None:
        call, _ = self._life(context)
        for item in request.outputs:
            if item.input_id == call.input_id:
                self._workspace.calls.finish(call, _read(item.result, item.data_format))

    def _serve_task_result(self, request: Any, context: Context) -> None:
        """Fail the call of a container that could not import its function."""
        call, _ = self._life(context)
        data = _read(request.result, 0)
        failed = Result(Status.INIT_FAILURE, data.payload, data.message, data.traceback, data.more)
        self._workspace.calls.finish(call, failed)

    # -- by clients
    # ----------------------------------------------------------------------------------------------

    def _serve_task_list(self, request: Any, _: Context) -> Any:
        answer = api_pb2.TaskListResponse()
        for call in self._workspace.calls.all():
            app = call.function.app
            chosen = app.app_id == request.app_id
            if not request.app_id:
                chosen = app.environment == self._workspace.environment(request.environment_name)
            if call.life is not None and chosen:
                answer.tasks.add(
                    task_id=call.life.task_id,
                    app_id=app.app_id,
                    app_description=app.name or app.description,
                    started_at=call.life.started,
                    enqueued_at=call.created,
                )
        return answer

    def _serve_task_get_info(self, request: Any, _: Context) -> Any:
        for call in self._workspace.calls.all():
            for life in call.lives:
                if life.task_id == request.task_id:
                    answer = api_pb2.TaskGetInfoResponse(app_id=call.function.app.app_id)
                    answer.info.id, answer.info.started_at = life.task_id, life.started
                    answer.info.finished_at = life.ended or 0.0
                    return answer
        raise not_found(f"Task with ID '{request.task_id}' not found")

    def _serve_container_stop(self, request: Any, _: Context) -> Any:
        """Take a container away; its input is given to another one."""
        call_and_life = self._workspace.calls.by_task(request.task_id)
        if call_and_life is None:
            raise not_found(f"Task with ID '{request.task_id}' not found")
        if request.graceful:
            raise RefusedError("UNIMPLEMENTED", "the stand-in does not stop containers gracefully")
        self._workspace.calls.interrupt(call_and_life[0])
        return api_pb2.ContainerStopResponse()

    def _life(self, context: Context) -> tuple[Call, Life]:
        if not context.task_id:
            raise RefusedError("PERMISSION_DENIED", "only a container may ask for this")
        call_and_life = self._workspace.calls.by_task(context.task_id)
        if call_and_life is None:
            raise not_found(f"Task with ID '{context.task_id}' not found")
        return call_and_life


def _read(sent: Any, form: int) -> Result:
    payload = Payload(sent.data, sent.data_blob_id, form)
    kept = api_pb2.GenericResult(serialized_tb=sent.serialized_tb, tb_line_cache=sent.tb_line_cache)
    return Result(
        Status(sent.status),
        payload if sent.WhichOneof("data_oneof") else None,
        sent.exception,
        sent.traceback,
        kept.SerializeToString(),
    )
