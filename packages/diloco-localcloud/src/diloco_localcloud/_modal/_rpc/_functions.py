"""RPCs about apps and functions: to deploy them and to find them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modal_proto import api_pb2

from .._workspace._app import Function
from .._workspace._habits import new_id
from .._workspace._refused import RefusedError, not_found
from .._workspace._workspace import Workspace
from ._context import Bell, Context, Rpcs
from ._handles import layout, metadata


class Functions(Rpcs):
    """Operations on the apps and functions of a workspace."""

    def __init__(self, workspace: Workspace, bell: Bell) -> None:
        super().__init__(workspace, bell)
        self._bound: dict[tuple[str, bytes], Function] = {}

    # -- apps
    # ----------------------------------------------------------------------------------------------

    def _serve_app_create(self, request: Any, _: Context) -> Any:
        environment = self._workspace.environment(request.environment_name)
        app = self._workspace.create_app(environment, request.description)
        app.state = api_pb2.AppState.Name(request.app_state).removeprefix("APP_STATE_")
        url = _page(app.app_id)
        return api_pb2.AppCreateResponse(app_id=app.app_id, app_page_url=url, app_logs_url=url)

    def _serve_app_get_or_create(self, request: Any, _: Context) -> Any:
        environment = self._workspace.environment(request.environment_name)
        app = self._workspace.deployed(environment, request.app_name)
        if app is None:
            if request.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise not_found(
                    f"App '{request.app_name}' not found in environment '{environment}'"
                )
            app = self._workspace.create_app(environment, request.app_name, request.app_name)
            self._workspace.publish(app, request.app_name, {}, "DEPLOYED")
        return api_pb2.AppGetOrCreateResponse(app_id=app.app_id)

    def _serve_app_get_by_deployment_name(self, request: Any, _: Context) -> Any:
        environment = self._workspace.environment(request.environment_name)
        app = self._workspace.deployed(environment, request.name)
        return api_pb2.AppGetByDeploymentNameResponse(
            app_id=app.app_id if app else "", environment_name=environment
        )

    def _serve_app_get_layout(self, request: Any, _: Context) -> Any:
        app = self._workspace.app(request.app_id)
        return api_pb2.AppGetLayoutResponse(app_layout=layout(app))

    def _serve_app_publish(self, request: Any, _: Context) -> Any:
        app = self._workspace.app(request.app_id)
        state = api_pb2.AppState.Name(request.app_state).removeprefix("APP_STATE_")
        self._workspace.publish(app, request.name, request.function_ids, state)
        return api_pb2.AppPublishResponse(
            url=_page(app.app_id), deployed_at=self._workspace.timeline.now()
        )

    def _serve_app_stop(self, request: Any, _: Context) -> Any:
        self._workspace.stop_app(self._workspace.app(request.app_id))

    def _serve_app_client_disconnect(self, request: Any, _: Context) -> Any:
        app = self._workspace.app(request.app_id)
        if app.state not in {"DEPLOYED", "DETACHED"}:
            self._workspace.stop_app(app)

    def _serve_app_heartbeat(self, request: Any, _: Context) -> Any:
        if self._workspace.app(request.app_id).stopped is not None:
            raise RefusedError("FAILED_PRECONDITION", "App is stopped")

    def _serve_app_list(self, request: Any, _: Context) -> Any:
        environment = self._workspace.environment(request.environment_name)
        answer = api_pb2.AppListResponse()
        for app in self._workspace.apps.values():
            if app.environment == environment:
                running = [call for call in self._workspace.calls.of(app) if call.life is not None]
                answer.apps.add(
                    app_id=app.app_id,
                    description=app.name or app.description,
                    name=app.name,
                    state=api_pb2.AppState.Value(f"APP_STATE_{app.state}"),
                    created_at=app.created,
                    stopped_at=app.stopped or 0.0,
                    n_running_tasks=len(running),
                )
        return answer

    # -- functions
    # ----------------------------------------------------------------------------------------------

    def _serve_function_precreate(self, request: Any, _: Context) -> Any:
        app = self._workspace.app(request.app_id)
        function = self._workspace.create_function(app, request.function_name)
        return api_pb2.FunctionPrecreateResponse(
            function_id=function.function_id, handle_metadata=metadata(function)
        )

    def _serve_function_create(self, request: Any, _: Context) -> Any:
        data = request.function_data
        if request.HasField("function"):
            data = _as_data(request.function)
        chosen = min(data.ranked_functions, key=lambda each: each.rank).function
        self._check(chosen)
        app = self._workspace.app(request.app_id)
        function = self._workspace.create_function(app, data.function_name)
        # Nothing stays of an earlier deploy.
        vars(function).update(vars(Function(function.function_id, app, function.name)))
        function.definition, function.definition_id = data, new_id("de")
        _configure(function, data)
        _configure(function, chosen)
        function.secret_ids = tuple(chosen.secret_ids)
        return api_pb2.FunctionCreateResponse(
            function_id=function.function_id,
            function=chosen,
            handle_metadata=metadata(function),
            function_data=data,
        )

    def _serve_function_get(self, request: Any, _: Context) -> Any:
        environment = self._workspace.environment(request.environment_name)
        function = self._workspace.find_function(environment, request.app_name, request.object_tag)
        return api_pb2.FunctionGetResponse(
            function_id=function.function_id,
            handle_metadata=metadata(function),
            function=_data(function),
        )

    def _serve_function_get_by_id(self, request: Any, _: Context) -> Any:
        function = self._workspace.function(request.function_id)
        return api_pb2.FunctionGetByIdResponse(
            handle_metadata=metadata(function), function=_data(function)
        )

    def _serve_function_bind_params(self, request: Any, _: Context) -> Any:
        base = self._workspace.function(request.function_id)
        options = request.function_options
        key = (base.function_id, options.SerializeToString(deterministic=True))
        if key not in self._bound:
            self._bound[key] = self._with_options(base, options)
        bound = self._bound[key]
        return api_pb2.FunctionBindParamsResponse(
            bound_function_id=bound.function_id, handle_metadata=metadata(bound)
        )

    def _check(self, wanted: Any) -> None:
        """Refuse GPUs that Modal does not know, and retries by Modal itself."""
        self._workspace.check_gpu(wanted.resources.gpu_config.gpu_type)
        if wanted.retry_policy.retries:
            raise RefusedError("UNIMPLEMENTED", "the stand-in tries no input again: no retries=")

    def _with_options(self, base: Function, options: Any) -> Function:
        self._check(options)
        if options.HasField("timeout_secs") and not 1 <= options.timeout_secs <= 86400:
            raise RefusedError(
                "INVALID_ARGUMENT", "Function timeout must be between 1 second and 24 hours"
            )
        for secret_id in options.secret_ids:
            if secret_id not in self._workspace.secrets:
                raise not_found(f"Secret with ID '{secret_id}' not found")
        bound = replace(base, function_id=new_id("fu"), options=options, base=base)
        _configure(bound, options)
        kept = () if options.replace_secret_ids else base.secret_ids
        bound.secret_ids = (*kept, *options.secret_ids)
        self._workspace.functions[bound.function_id] = bound
        return bound


def _configure(function: Function, wanted: Any) -> None:
    """Take over what a definition or options ask for; the rest stays as it is."""
    function.timeout = float(wanted.timeout_secs or function.timeout)
    function.max_containers = wanted.concurrency_limit or function.max_containers
    if isinstance(wanted, api_pb2.FunctionData):
        return  # the rest is in its ranked functions
    function.regions = tuple(wanted.scheduler_placement.regions) or function.regions
    function.cloud = wanted.cloud_provider_str or function.cloud
    resources = wanted.resources
    if resources.gpu_config.gpu_type:
        function.gpu, function.gpu_count = resources.gpu_config.gpu_type, resources.gpu_config.count
    function.cpu = resources.milli_cpu / 1000 or function.cpu
    function.memory = resources.memory_mb or function.memory
    function.memory_limit = resources.memory_mb_max or function.memory_limit


def _page(app_id: str) -> str:
    return f"https://modal.com/id/{app_id}"


def _data(function: Function) -> Any:
    if function.definition is not None:
        return function.definition
    gpu = api_pb2.GPUConfig(gpu_type=function.gpu, count=function.gpu_count)
    return _as_data(
        api_pb2.Function(
            function_name=function.name,
            timeout_secs=int(function.timeout),
            resources=api_pb2.Resources(gpu_config=gpu),
        )
    )


def _as_data(function: Any) -> Any:
    """Return the definition with choices that older clients write as a single one."""
    names = ("module_name", "function_name", "function_type", "timeout_secs")
    ranked = api_pb2.FunctionData.RankedFunction(rank=0, function=function)
    fields = {name: getattr(function, name) for name in names}
    return api_pb2.FunctionData(ranked_functions=[ranked], **fields)
