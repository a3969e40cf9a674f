"""A replica whose wrapper runs here, with a Dict in memory."""

import json
import os
import textwrap
import time

import modal

from diloco_modal import ModalOptions, run_replica
from diloco_modal._client import _wire
from diloco_modal._request._payload import payloads
from diloco_protocol import Outcome, make_request

PATIENCE = 600.0
PROGRAM = """
    import os, pathlib, signal, time

    def train(what, folder=None):
        if what == "attempt":
            return int(os.environ["DILOCO_ATTEMPT"])
        if what == "fail":
            raise TimeoutError("a barrier")
        if what == "again":
            if os.environ["DILOCO_ATTEMPT"] == "1":
                raise ValueError("once")
            while not pathlib.Path(folder, "go").exists():
                time.sleep(0.02)
        if what == "session":
            return os.getsid(os.getppid())
        if what == "returns when it is told to end":
            told = []
            signal.signal(signal.SIGTERM, lambda *_: told.append(True))
            pathlib.Path(folder, "begun").write_text("")
            while not told:
                time.sleep(0.01)
            return "done"
        if what == "wait":
            pathlib.Path(folder, "begun").write_text("")
            time.sleep(600)
        return [os.environ["REPLICA_RANK"], os.environ.get("COLOUR")]
"""


class Held(dict):
    """What the wrapper uses of a ``modal.Dict``; its entries are JSON, shown as what they say."""

    def put(self, key, text, *, skip_if_exists=False):
        if skip_if_exists and key in self:
            return False
        self[key] = json.loads(text)
        return True


def get_entry(held, key):
    value = held.get(key)
    return None if value is None else json.dumps(value)


def say_status(monkeypatch, word):
    """What Modal says of the replica's own call; an error is raised."""

    def get_status(_, call_id):
        assert call_id == "fc-own"
        if isinstance(word, Exception):
            raise word
        return word

    monkeypatch.setattr(modal.Client, "from_env", lambda: None)
    monkeypatch.setattr(_wire, "get_status", get_status)


def texts(held):
    """The entries of a record as Modal has them."""
    return {key: json.dumps(value) for key, value in held.items()}


def make_record(monkeypatch, tmp_path):
    """The record that the wrapper finds; its program is on the path of replicas."""
    held = Held(launch={"id": "one", "at": time.time()})
    monkeypatch.setattr(modal.Dict, "from_name", lambda *_, **__: held)
    monkeypatch.setattr(_wire, "get_entry", get_entry)
    say_status(monkeypatch, modal.exception.ConnectionError("away"))
    monkeypatch.setattr(modal, "current_function_call_id", lambda: "fc-own")
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return held


def payload(what="rank", *, start_in=60.0, **options):
    own = {name: options.pop(name) for name in ("pending_timeout",) if name in options}
    kwargs = {"what": what, "folder": options.pop("folder", None)}
    request = make_request(1, "program:train", kwargs, run_id="run", **options)
    chosen = ModalOptions(grace=2.0, **own)
    (told,) = payloads(request, chosen, "one", time.time() + start_in)
    return told


def outcome(told):
    return Outcome.from_json(run_replica(told))
