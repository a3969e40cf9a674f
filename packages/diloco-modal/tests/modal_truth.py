"""What is true of a replica, from the stand-in's records; written anew, not by the executor."""

import json
import pickle

from diloco_conformance import Resources, Truth


def entries_of(stand_in, run_id):
    """The entries of a run's Dict, or nothing.

    To look at them is no use, so that they fade as they would have.
    """
    workspace = stand_in._workspace
    with workspace.lock:
        place = workspace.environments[0]
        held = workspace.dicts.named(place, f"diloco-{run_id}")
        if held is None:
            return {}
        oldest = workspace.timeline.now() - workspace.habits.retention_seconds
        return {
            pickle.loads(key): json.loads(pickle.loads(entry.value))
            for key, entry in held.entries.items()
            if entry.used > oldest
        }


class Record:
    """A Dict in the hands of a test, whose entries are JSON, as those of a run's record."""

    def __init__(self, held):
        self.held = held

    def put(self, key, value, *, skip_if_exists=False):
        return self.held.put(key, json.dumps(value), skip_if_exists=skip_if_exists)

    def get(self, key):
        text = self.held.get(key)
        return None if text is None else json.loads(text)

    def pop(self, key):
        self.held.pop(key)

    def items(self):
        return {key: json.loads(text) for key, text in self.held.items().items()}


class Texts(Record):
    """The same, read as the wrapper reads it."""

    def get(self, key):
        return self.held.get(key)


def expired(stand_in, call):
    """Whether Modal still has the output of a call."""
    workspace = stand_in._workspace
    with workspace.lock:
        return workspace.calls.expired(workspace.calls.by_id(call.call_id))


def truth_of(stand_in, handle, call):
    """The truth about the call of a handle."""
    entries = entries_of(stand_in, handle.run_id)
    launch = entries.get("launch")
    gone = launch is None or launch["id"] != handle.metadata["launch"]
    if call is None or gone or expired(stand_in, call):
        alive = call is not None and (call.has_container or call.status == "pending")
        return Truth(None, alive=alive)
    status, lives = call.status, max(1, call.attempt)
    if status == "pending":
        return Truth("pending", alive=True, attempt=call.attempt + 1)
    if call.has_container:
        return Truth("running", alive=True, attempt=lives, stopping=status == "terminated")
    if status == "terminated":
        with stand_in._workspace.lock:
            held = stand_in._workspace.calls.by_id(call.call_id)
            waited = bool(held.lives) and held.lives[-1].ended <= held.ended
        return Truth("cancelled", alive=False, attempt=lives + waited)
    if status == "success":
        code = call_outcome(stand_in, call)["exit_code"]
        state = "failed" if code else "succeeded"
        return Truth(state, alive=False, attempt=lives, exit_code=code or ..., out_of_memory=False)
    memory = status == "kernel_oom_kill"
    return Truth("failed", alive=False, attempt=lives, out_of_memory=memory)


def call_outcome(stand_in, call):
    """The JSON that a call has returned."""
    workspace = stand_in._workspace
    with workspace.lock:
        payload = workspace.calls.by_id(call.call_id).result.payload
        data = workspace.blobs[payload.blob] if payload.blob else payload.data
    return json.loads(pickle.loads(data))


def resources_of(call):
    """What was asked for, in the words of a launch."""
    asked = call.options
    memory = int(asked["memory"]) * 2**20
    gpu = f"{asked['gpu']}:{asked['gpu_count']}" if asked["gpu"] else None
    return Resources(cpu=asked["cpu"] or None, memory=memory or None, gpu=gpu, spot=True)


def told(status):
    """What a look has said, without times: state, reason, attempt, and if it is being stopped."""
    return status.state.value, status.reason, status.attempt, status.stopping
