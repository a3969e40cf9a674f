"""RPCs about calls of functions: to make them, look at them, and cancel them."""

from __future__ import annotations

from typing import Any

from modal_proto import api_pb2

from .._workspace._call import Call, Payload, Result
from .._workspace._refused import RefusedError
from ._context import Context, Rpcs


class FunctionCalls(Rpcs):
    """Operations on the calls of a workspace."""

    def _serve_function_map(self, request: Any, context: Context) -> Any:
        function = self._workspace.function(request.function_id)
        if function.app.stopped is not None:
            raise RefusedError("FAILED_PRECONDITION", f"App '{function.app.name}' is stopped")
        if len(request.pipelined_inputs) != 1:
            raise RefusedError("UNIMPLEMENTED", "the stand-in takes one input for each call")
        sent = request.pipelined_inputs[0].input
        payload = Payload(sent.args, sent.args_blob_id, sent.data_format)
        call = self._workspace.calls.spawn(function, payload, context.key)
        answer = api_pb2.FunctionMapResponse(
            function_call_id=call.call_id, function_call_jwt=call.call_id, max_inputs_outstanding=1
        )
        answer.pipelined_inputs.add(idx=0, input_id=call.input_id, input_jwt=call.input_id)
        return answer

    async def _serve_function_get_outputs(self, request: Any, _: Context) -> Any:
        def ended() -> Any:
            call = self._workspace.calls.by_id(request.function_call_id)
            return None if call.result is None else self._ended(call)

        answer = await self._until(request.timeout, ended)
        return answer or api_pb2.FunctionGetOutputsResponse(num_unfinished_inputs=1)

    def _ended(self, call: Call) -> Any:
        answer = api_pb2.FunctionGetOutputsResponse(last_entry_id="1-0")
        if not self._workspace.calls.expired(call):
            assert call.result is not None
            answer.idxs.append(0)
            answer.outputs.add(
                result=_result(call.result),
                idx=0,
                input_id=call.input_id,
                data_format=call.result.payload.form if call.result.payload else 0,
                task_id=call.lives[-1].task_id if call.lives else "",
                input_started_at=call.lives[-1].started if call.lives else 0.0,
                output_created_at=call.ended,
                retry_count=max(len(call.lives) - 1, 0),
            )
        return answer

    def _serve_function_get_call_graph(self, request: Any, _: Context) -> Any:
        call = self._workspace.calls.by_id(request.function_call_id)
        answer = api_pb2.FunctionGetCallGraphResponse()
        life = call.life or (call.lives[-1] if call.lives and call.result is not None else None)
        answer.inputs.add(
            input_id=call.input_id,
            function_call_id=call.call_id,
            status=int(call.result.status) if call.result is not None else 0,
            task_id="" if life is None else life.task_id,
        )
        definition = call.function.definition
        answer.function_calls.add(
            function_call_id=call.call_id,
            function_name=call.function.name,
            module_name="" if definition is None else definition.module_name,
        )
        return answer

    def _serve_function_call_from_id(self, request: Any, _: Context) -> Any:
        call = self._workspace.calls.by_id(request.function_call_id)
        answer = api_pb2.FunctionCallFromIdResponse(function_call_id=call.call_id, num_inputs=1)
        answer.metadata.app_id = call.function.app.app_id
        answer.metadata.function_id = call.function.function_id
        return answer

    def _serve_function_call_cancel(self, request: Any, _: Context) -> Any:
        call = self._workspace.calls.by_id(request.function_call_id)
        self._workspace.calls.cancel(call, terminate=request.terminate_containers)


def _result(result: Result) -> Any:
    message = api_pb2.GenericResult.FromString(result.more)
    message.status, message.exception = int(result.status), result.message
    if result.traceback:
        message.traceback = result.traceback
    if result.payload is not None and result.payload.blob:
        message.data_blob_id = result.payload.blob
    elif result.payload is not None:
        message.data = result.payload.data
    return message
