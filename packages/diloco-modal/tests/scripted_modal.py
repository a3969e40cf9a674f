"""The standard suite's world for Modal: a stand-in over gRPC, whose calls the suite moves."""

import asyncio
import contextlib
import json
import math
from dataclasses import replace
from signal import Signals

import modal
import modal._grpc_client as transport
from modal._utils.async_utils import synchronizer
from modal_truth import Record, Texts, entries_of, resources_of, truth_of

from diloco_conformance import Ability, Fault, Harness, Operation, Step, Told
from diloco_localcloud import ModalStandIn
from diloco_modal import ModalSpawnExecutor
from diloco_modal._client._lives import new_life
from diloco_modal._wrapper import claim
from diloco_protocol import DilocoError, Outcome, Reason, ReplicaSpec, environment

FAULTS = {
    Fault.THROTTLE: "throttle",
    Fault.SERVER_ERROR: "server_error",
    Fault.CUT: "cut",
    Fault.FORBIDDEN: "forbidden",
}
CALLS = {
    Operation.LAUNCH: ["FunctionMap"],
    Operation.OBSERVE: [
        "FunctionGetOutputs",
        "FunctionGetCallGraph",
        "DictContents",
        "DictLen",
        "DictList",
        "DictGetOrCreate",
    ],
    Operation.CANCEL: ["FunctionCallCancel"],
    Operation.LOGS: ["AppFetchLogs", "AppCountLogs"],
    Operation.PURGE: ["DictDelete"],
}
#: Dicts in one page of a list, for Modal's client.
_PAGE = 100
#: Variables that the suite gives to secrets; a Secret of Modal has its value under the name of the
#: variable.
KEYS = ("S", "API_KEY", "OTHER", "OF_THE_STORE", "CONF_SECRET")

# Between its tries Modal's client waits up to a second of real time, and this cannot be set.
object.__setattr__(transport._DEFAULT_RETRY, "base_delay", 0.001)
object.__setattr__(transport._DEFAULT_RETRY, "max_delay", 0.001)


class ModalHarness(Harness):
    """Calls on a stand-in; plays ``run_replica`` and the runner (claims, timeouts, outcomes)."""

    entrypoint = "trainer:train"
    gpus = ("L4", "H100:8", "A10G:4")
    patience = 600.0
    cannot = {
        Fault.CONFLICT: "nothing that the executor changes has a version that could conflict",
        **dict.fromkeys(
            (Ability.LOSE, Ability.DAMAGE),
            (
                "what a call returns is both the record that it has succeeded and its result: "
                "Modal loses them together"
            ),
        ),
        Ability.RACE: "Modal marks a call as terminated at once, whatever its program does then",
        Ability.RESTART: (
            "the runner starts the program again at once, in the same container; test_wrapper.py "
            "has these"
        ),
    }

    def __init__(self):
        super().__init__()
        self.stand_in = ModalStandIn().start()
        self.world = self.stand_in.world
        self.world.deploy("diloco", ["replica"])
        self.client = self.stand_in.client()
        self.deadlines = {}
        self.lives = {}
        self.begun = {}
        self.secrets = {}
        self.fillers = []
        self.refusing, self.refused = False, 0

    def make_executor(self, **options):
        return self.executor_of(self.client, options)

    def executor_of(self, client, options):
        return ModalSpawnExecutor(
            **{
                "client": client,
                "backoff": self.backoff(),
                "clock": self.clock,
                "retry_timeout": 5,
                **options,
            }
        )

    # --- the clock ---

    def clock(self):
        return self.world.now()

    def sleep(self, seconds):
        self.refused += self.refusing
        limit = self.time.limit
        if limit is not None and self.clock() > limit:
            self.time.limit = 0
            self.time.sleep(seconds)  # raises
        if not self.time.idle():
            self.advance(seconds)

    def now(self):
        return self.clock()

    def age(self, seconds):
        self.advance(seconds)

    def advance(self, seconds):
        """Time passes, and runners end what is overdue, before Modal would."""
        end = self.clock() + seconds
        while due := [at for at in list(self.deadlines.values()) if at < end]:
            self.world.advance(max(0.0, min(due) - self.clock()))
            self.time_out()
        self.world.advance(max(0.0, end - self.clock()))

    def time_out(self):
        for call_id, deadline in list(self.deadlines.items()):
            if self.clock() >= deadline and self.deadlines.pop(call_id, None) is not None:
                self.report(
                    call_id, Outcome(143, error="the timeout passed", reason=Reason.TIMEOUT)
                )

    def settle(self):
        self.sweep()
        self.world.settle(within=60.0)

    def sweep(self):
        """Calls that hold no rank get a container at some time; the wrapper returns at once."""
        for call in self.world.calls():
            if call.status != "pending":
                continue
            payload = call.arguments[0][0]
            entries = entries_of(self.stand_in, payload["record"].removeprefix("diloco-"))
            held = entries.get(f"call-{payload['rank']}", {}).get("call", call.call_id)
            ours = entries.get("launch", {}).get("id") == payload["launch"]
            if not ours or held != call.call_id:
                call.start()
                record = None if not entries else Texts(self.world.dict(payload["record"]))
                launch = json.dumps(entries.get("launch"))
                call.end(claim(payload, record, launch, call.call_id))

    # --- calls ---

    def of(self, handle):
        return self.world.call(handle.metadata["function_call_id"])

    def payload(self, handle):
        return self.of(handle).arguments[0][0]

    def record(self, handle):
        return Record(self.world.dict(f"diloco-{handle.run_id}"))

    # --- the hand ---

    def drive(self, handle, step, value=None):
        call = self.of(handle)
        if step not in {Step.START, Step.PRINT}:
            self.flush(handle)
        if step is Step.PRINT:
            self.write(handle, "".join(f"{line}\n" for line in value).encode())
            return
        if step is Step.START:
            self.begin(handle, call)
            return
        self.deadlines.pop(call.call_id, None)
        if step is Step.SUCCEED:
            self.succeed(call, value)
        elif step is Step.FAIL:
            outcome = Outcome(value, error=f"exit code {value}", reason=Reason.ERROR)
            self.report(call.call_id, outcome)
        elif step is Step.KILL:
            code = 128 + Signals[value]
            outcome = Outcome(code, value, error=f"ended by {value}", reason=Reason.ERROR)
            self.report(call.call_id, outcome)
        elif step is Step.OOM:
            call.oom()  # the kernel kills the whole container, the wrapper included
        elif step is Step.PREEMPT:
            self.preempt(call)
        elif step is Step.STOP:
            call.stop()
            self.advance(2.0)
        if step in {Step.OOM, Step.STOP}:
            # Modal tells nobody when it was, so it is dated by who looks first: whoever collects
            # does so every few seconds.
            with contextlib.suppress(DilocoError):
                self.make_executor().describe(handle)

    def begin(self, handle, call):
        call.start()
        payload, record = self.payload(handle), Texts(self.record(handle).held)
        refused = claim(payload, record, record.get("launch"), call.call_id)
        if refused is not None:
            call.end(refused)
            return
        life = new_life(record, payload["rank"], self.clock())
        self.lives[call.call_id] = (record, payload["rank"], life.number, life.before)
        call.on_interrupt(1.0, lambda: self.end_life(call.call_id))
        timeout = ReplicaSpec.from_json(payload["spec"]).timeout
        self.deadlines[call.call_id] = math.inf if timeout is None else self.clock() + timeout

    def end_life(self, call_id, *, taken_away=True):
        """The wrapper writes down that its runner is over."""
        self.deadlines.pop(call_id, None)
        record, rank, life, before = self.lives[call_id]
        value = {"started": before["started"] + 1, "failed": before["failed"], "at": self.clock()}
        value["again"] = taken_away and self.world.call(call_id).status in {"pending", "running"}
        record.put(f"end-{rank}-{life}", value, skip_if_exists=True)

    def report(self, call_id, outcome):
        self.end_life(call_id, taken_away=False)
        attempt = self.lives[call_id][3]["started"] + 1
        self.world.call(call_id).end(replace(outcome, attempt=attempt).to_json())

    def succeed(self, call, value):
        size, most = len(json.dumps(value)), ModalSpawnExecutor.capabilities.max_result_bytes
        if size > most:
            error = f"the result has {size} bytes of JSON, and {most} are allowed"
            self.report(call.call_id, Outcome(1, error=error, reason=Reason.ERROR))
        else:
            self.report(call.call_id, Outcome(0, result=value, reason=Reason.COMPLETED))

    def preempt(self, call):
        call.on_interrupt(0.0, lambda: self.end_life(call.call_id))
        if call.interrupted:  # it is being cancelled, and its machine goes
            self.end_life(call.call_id)
            call.crash()
        else:
            call.preempt()
            self.world.advance(0.0)

    def write(self, handle, data, stream="stdout"):
        """Whole lines reach the log, from each stream on its own."""
        place = handle.metadata["function_call_id"], stream
        lines, newline, rest = (self.begun.pop(place, b"") + data).rpartition(b"\n")
        if newline:
            self.of(handle).log((lines + newline).decode(errors="replace"), stream)
        self.begun[place] = rest

    def flush(self, handle):
        """What was begun is a line when nobody writes any more."""
        for stream in ("stdout", "stderr"):
            if rest := self.begun.pop((handle.metadata["function_call_id"], stream), b""):
                self.of(handle).log(rest.decode(errors="replace"), stream)

    def expire(self, handles):
        for run_id in {handle.run_id for handle in handles}:
            modal.Dict.objects.delete(f"diloco-{run_id}", client=self.client, allow_missing=True)

    def remove(self, handle):
        """As somebody does with ``modal dict delete``, which is done at once."""
        self.expire([handle])

    def between(self, action):
        """The client wants pages of a hundred: what fills the first one is not ours."""
        with self.world._workspace.lock:
            place = self.world._workspace.environments[0]
            for number in range(_PAGE - 3):
                name = f"weights-{len(self.fillers)}-{number}"
                self.world._workspace.dicts.create(place, name)
        self.fillers.append(action)
        inner = synchronizer._translate_in(self.client)
        stub = getattr(inner, "_stub", None) or inner.stub  # older clients have the latter
        plain = stub.DictList

        async def listed(request):
            stub.DictList = plain
            answer = await plain(request)
            await asyncio.to_thread(action)
            return answer

        stub.DictList = listed

    def foreign(self, name):
        held = modal.Dict.from_name(
            f"diloco-{name}", create_if_missing=True, client=self.client
        ).hydrate()
        held.put("theirs", 1)

    def secret(self, value):
        name = f"secret-{len(self.secrets)}"
        self.secrets[name] = value
        self.world.add_secret(name, dict.fromkeys(KEYS, value))
        return name

    def elsewhere(self):
        """In another environment: of workspaces the client tells nothing."""
        self.world.add_environment("other")
        self.world.deploy("diloco", ["replica"], environment="other")
        return self.executor_of(self.client, {"environment_name": "other"})

    # --- what is known ---

    def told(self, handle):
        payload = self.payload(handle)
        spec = ReplicaSpec.from_json(payload["spec"])
        spec = replace(spec, attempt=max(1, self.of(handle).attempt))
        secrets = {name: self.secrets[held] for name, held in payload["secrets"].items()}
        variables = {**secrets, **payload["env"], **environment(spec)}
        return Told(spec.rank, spec.world_size, spec.kwargs, variables, spec.timeout)

    def labels(self, handle):
        return entries_of(self.stand_in, handle.run_id)["launch"]["labels"]

    def resources(self, handle):
        return resources_of(self.of(handle))

    def truth(self, handle):
        try:
            call = self.of(handle)
        except LookupError:
            call = None
        return truth_of(self.stand_in, handle, call)

    def living(self):
        self.sweep()
        return sum(call.has_container or call.status == "pending" for call in self.world.calls())

    def sent(self):
        """In rank order within a launch, which starts several calls at the same time."""
        launches = {}
        for call in self.world.calls():
            payload = call.arguments[0][0]
            launches.setdefault(payload["launch"], {})[payload["rank"]] = call
        return [self.request(of[rank]) for of in launches.values() for rank in sorted(of)]

    @staticmethod
    def request(call):
        payload, known = call.arguments[0][0], call.options
        options = {"timeout": known["timeout"], "max_containers": known["max_containers"]}
        if known["gpu"]:
            options["gpu"] = f"{known['gpu']}:{known['gpu_count']}"
        options |= {name: known[name] for name in ("cpu", "memory") if known[name]}
        # Of a launch that there is not yet, a plan knows neither the id nor the time, nor the name
        # of the default environment.
        unknown = {"launch": "", "start_by": 0.0, "environment_name": None}
        sent = {**payload, "spec": json.loads(payload["spec"]), **unknown}
        return {"app": call.app, "function": call.function, "options": options, "payload": sent}

    # --- faults ---

    def inject(self, operation, fault, *, after=0):
        if fault is Fault.REFUSED:  # whoever is refused one call is refused all
            assert not after
            self.stand_in.refuse()
            self.refusing = True
            return
        if fault in {Fault.AMBIGUOUS, Fault.UNANSWERED}:
            times = 1 if fault is Fault.AMBIGUOUS else None
            self.stand_in.faults.add("ambiguous", verb="FunctionMap", times=times, after=after)
            return
        for verb in CALLS[operation]:
            self.stand_in.faults.add(FAULTS[fault], verb=verb, times=None, after=after)

    def clear(self):
        self.stand_in.accept()
        self.refusing = False
        self.stand_in.faults.clear()

    def calls(self):
        """What is refused does not reach the stand-in; a pause follows."""
        return len(self.stand_in.calls.requests()) + self.refused

    def close(self):
        self.client.__exit__(None, None, None)  # older clients have no close
        self.stand_in.stop()
