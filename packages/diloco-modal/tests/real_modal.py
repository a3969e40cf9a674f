"""The standard suite's world of real calls: Modal's container entrypoint, in local processes."""

import codecs
import json
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path

import modal
from modal_truth import Record

from diloco_conformance import Ability, Fault, Harness, Operation, Puppets, Step, Truth
from diloco_conformance import Resources as Asked
from diloco_modal import ModalSpawnExecutor, build_app

REAL = "the scripted world does that"
PATIENCE = 600.0


class NamingExecutor(ModalSpawnExecutor):
    """A Secret's maker knows its variables; the suite names them only when it launches."""

    def __init__(self, harness, **options):
        self._harness = harness
        super().__init__(**options)

    def _check_request(self, request):
        self._harness.name_secrets(request.secrets)
        super()._check_request(request)


class RealModalHarness(Harness):
    """Real calls, real time; the truth is that of the stand-in and of a client of its own.

    Args:
        stand_in: A ``ModalProcesses`` that runs, and whose containers have ``Puppets.source`` on
            their import path.
        folder: Where puppets are told what to do.
    """

    entrypoint = Puppets.entrypoint
    starts_by_itself = True
    many_ranks = 11
    many_runs = 3
    long_log = 100_000
    gpus = ("L40S", "h100:8", "any:2")
    short_timeout = 12.0
    resolution = 0.2
    overrun = 0.5
    slack = 20.0
    patience = PATIENCE
    cannot = {
        **dict.fromkeys([*Operation, *Fault, Ability.CALLS, Ability.SENT], REAL),
        Step.OOM: "a puppet uses no memory",
        Ability.RACE: "a puppet ends within milliseconds of a cancel",
        Ability.AGE: "days do not pass here; the scripted world has them",
        Ability.ELSEWHERE: REAL,
        Ability.BETWEEN: REAL,
        **dict.fromkeys(
            (Ability.LOSE, Ability.DAMAGE),
            (
                "what a call returns is both the record that it has succeeded and its result: "
                "Modal loses them together"
            ),
        ),
    }

    def __init__(self, stand_in, folder):
        super().__init__()
        self.stand_in, self.world = stand_in, stand_in.world
        self.client = stand_in.client()
        self.folder = tempfile.TemporaryDirectory(prefix="diloco-puppets-", dir=folder)
        self.puppets = Puppets(Path(self.folder.name), patience=PATIENCE)
        self.entrypoint_args = self.puppets.arguments
        self.run_prefix = f"c{uuid.uuid4().hex[:10]}"
        self.before = {call.call_id for call in self.world.calls()}
        self.attempts, self.deadlines, self.started, self.restarts = {}, {}, set(), {}
        self.secrets, self.texts = {}, {}
        build_app().deploy(client=self.client)

    def make_executor(self, **options):
        chosen = {
            "run_id": self.run_prefix,
            "grace": 2.0,
            "retry_timeout": 3.0,
            "client": self.client,
            **options,
        }
        return NamingExecutor(self, backoff=self.backoff(), **chosen)

    def clock(self):
        return time.monotonic()

    def sleep(self, seconds):
        time.sleep(seconds)

    def advance(self, seconds):
        time.sleep(seconds)

    def name_secrets(self, wanted):
        for key, name in wanted.items():
            if name in self.secrets:
                value, keys = self.secrets[name]
                if key not in keys:
                    keys.add(key)
                    self.world.add_secret(name, dict.fromkeys(keys, value))

    # --- the hand ---

    def call(self, handle):
        return self.world.call(handle.metadata["function_call_id"])

    def payload(self, handle):
        ((payload,), _) = self.call(handle).arguments
        return payload

    def wait(self, handle, test, what):
        self.puppets.wait(
            lambda: test(self.truth(handle)), f"rank {handle.rank} of {handle.run_id} to {what}"
        )

    def drive(self, handle, step, value=None):
        attempt = self.attempts.get(handle, 1)
        if step is Step.PREEMPT:
            self.started.discard(handle)
            self.call(handle).preempt()
            self.attempts[handle] = attempt + 1
        if step in {Step.START, Step.PREEMPT}:
            self.up(handle)
        elif step is Step.STOP:
            self.call(handle).stop()
            self.over(handle)
        else:
            self.puppets.order(handle, step, value, attempt)
            if step is Step.PRINT:
                self.logged(handle, "".join(f"{line}\n" for line in value).encode(), "stdout")
            elif step in {Step.FAIL, Step.KILL} and self.may_restart(handle):
                self.restarts[handle] = self.restarts.get(handle, 0) + 1
                self.attempts[handle] = attempt + 1
                self.up(handle)
            else:
                self.over(handle)

    def up(self, handle):
        """Wait until its program runs, and the record says so."""
        attempt = self.attempts.get(handle, 1)
        self.puppets.told(handle, attempt)
        self.puppets.wait(
            lambda: attempt in self.recorded(handle), "an attempt to be in the record"
        )
        if handle not in self.started:
            self.started.add(handle)
            timeout = json.loads(self.payload(handle)["spec"]).get("timeout")
            if timeout is not None:
                self.deadlines[handle] = self.clock() + timeout

    def recorded(self, handle):
        """The attempts that the record has: those of a new container, and further ones in it."""
        entries = self.record(handle) or {}
        lives = [
            value["attempt"]
            for key, value in entries.items()
            if key.startswith(f"life-{handle.rank}-")
        ]
        return lives + [
            int(key.rpartition("-")[2])
            for key in entries
            if key.startswith(f"attempt-{handle.rank}-")
        ]

    def over(self, handle):
        self.deadlines.pop(handle, None)
        call = self.call(handle)
        self.wait(
            handle,
            lambda truth: truth.state is None or not (truth.alive or call.has_container),
            "end",
        )

    def may_restart(self, handle):
        return self.restarts.get(handle, 0) < self.payload(handle)["restarts"]

    def write(self, handle, data, stream="stdout"):
        self.puppets.write(handle, data, stream, self.attempts.get(handle, 1))
        self.logged(handle, data, stream)

    def logged(self, handle, data, stream):
        """Wait until the log has these bytes; the begin of a character may come later."""
        place = handle, stream, self.attempts.get(handle, 1)
        begun = self.texts.pop(place, b"") + data
        self.texts[place] = begun.rpartition(b"\n")[2]
        text, _ = codecs.utf_8_decode(begun, "replace", False)
        logs = modal.FunctionCall.from_id(self.call(handle).call_id, client=self.client).logs

        def there():
            return text in "".join(each.message for each in logs.tail(10_000, source=stream))

        self.puppets.wait(there, f"{len(text)} characters to be in the log")

    def secret(self, value):
        name = f"{self.run_prefix}-{uuid.uuid4().hex[:8]}"
        self.secrets[name] = value, set()
        return name

    def labels(self, handle):
        return self.record(handle)["launch"]["labels"]

    def resources(self, handle):
        options = self.call(handle).options
        gpu = options["gpu"] and f"{options['gpu']}:{options['gpu_count']}"
        return Asked(
            cpu=options["cpu"] or None,
            memory=(options["memory"] << 20) or None,
            gpu=gpu or None,
            spot=True,  # Modal may take any container away
        )

    def settle(self):
        for handle, deadline in list(self.deadlines.items()):
            truth = self.truth(handle)
            if truth.state is None or truth.state.terminal:
                del self.deadlines[handle]
            elif self.clock() > deadline:
                self.over(handle)
        for call in self.calls():
            if call.status not in {"pending", "running"}:
                self.puppets.wait(lambda call=call: not call.has_container, "a container to end")

    def expire(self, handles):
        name = f"diloco-{handles[0].run_id}"
        modal.Dict.objects.delete(name, client=self.client)

    def remove(self, handle):
        """As somebody does with ``modal dict delete``, which is done at once."""
        self.expire([handle])

    # --- the truth ---

    def calls(self):
        return [call for call in self.world.calls() if call.call_id not in self.before]

    def record(self, handle):
        """The entries of its run's record; None if it is gone, or another launch's."""
        try:
            entries = Record(self.world.dict(f"diloco-{handle.run_id}")).items()
        except LookupError:
            return None
        ours = entries.get("launch", {}).get("id") == handle.metadata["launch"]
        return entries if ours else None

    def truth(self, handle):
        attempt = self.attempts.get(handle, 1)
        if self.record(handle) is None:
            return Truth(None, alive=False)
        call = self.call(handle)
        status, alive = call.status, self.alive(handle, call)
        now = "running" if handle in self.started else "pending"
        if status in {"pending", "running"}:
            return Truth(now, True, attempt)
        if status == "terminated":
            return (
                Truth(now, True, attempt, stopping=True)
                if alive
                else self.ended("cancelled", handle)
            )
        if status != "success":
            return self.ended("failed", handle, alive)
        end = json.loads(
            modal.FunctionCall.from_id(call.call_id, client=self.client).get(timeout=0)
        )
        code = end["exit_code"]
        return self.ended("succeeded" if code == 0 else "failed", handle, alive, code)

    def alive(self, handle, call):
        """Say if its program or runner is there, or its container has yet to say they are gone."""
        told = call.has_container and self.puppets.report(handle, self.attempts.get(handle, 1))
        if not told:
            return call.has_container
        if any(Path(f"/proc/{told[who]}").exists() for who in ("pid", "parent")):
            return True
        return call.has_container and not self.said_to_be_over(handle)

    def said_to_be_over(self, handle):
        """Say if its newest container has written its end; a busy machine takes a while."""
        entries, lives = self.record(handle) or {}, 0
        while f"life-{handle.rank}-{lives + 1}" in entries:
            lives += 1
        return f"end-{handle.rank}-{lives}" in entries

    def ended(self, state, handle, alive=False, code=...):
        return Truth(state, alive, self.attempts.get(handle, 1), exit_code=code)

    def living(self):
        open_states = {"pending", "running"}
        return sum(call.has_container or call.status in open_states for call in self.calls())

    def foreign(self, name):
        held = modal.Dict.from_name(f"diloco-{name}", create_if_missing=True, client=self.client)
        held.hydrate().put("theirs", 1)

    def told(self, handle):
        return self.puppets.told(handle, self.attempts.get(handle, 1))

    def close(self):
        for call in self.calls():
            call.stop()
        for call in self.calls():
            call.kill()
            self.puppets.wait(lambda call=call: not call.has_container, "a container to end")
        for name in modal.Dict.objects.list(client=self.client, environment_name=""):
            modal.Dict.objects.delete(name.name, client=self.client, allow_missing=True)
        self.client.__exit__(None, None, None)  # older clients have no close
        self.folder.cleanup()


def image():
    """What the image of the puppets gives every container."""
    path = [str(Puppets.source), *(entry for entry in sys.path if entry)]
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(path)}
