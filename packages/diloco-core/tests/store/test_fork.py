"""A process that was forked from one that has opened a store: it is told, at once, and the other
one goes on.
"""

import os
import pickle
import signal
import sys
import traceback

import pytest

from diloco_core import StoreUnavailableError, connect
from diloco_core._store._open import open_store

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def forked(act):
    """Return what ``act`` returns in a forked process, which must not hang."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            answer = act()
        except BaseException:
            answer = traceback.format_exc()
        os.write(writing, pickle.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "it hangs, or has crashed"
    return pickle.loads(data)


def errors(*acts):
    """The messages of StoreUnavailableErrors that last."""
    messages = []
    for act in acts:
        with pytest.raises(StoreUnavailableError) as caught:
            act()
        assert caught.value.lasting
        messages.append(str(caught.value))
    return messages


@pytest.mark.sampled
@pytest.mark.parametrize("scheme", ["obstore+s3", "fsspec+s3", "memory"])
def test_an_open_store_is_refused_in_a_child(small_s3, scheme):
    store = open_store(f"{scheme}://bucket/run")
    store.put("k", [b"x"])
    assert store.background.submit(lambda: 7).result() == 7
    reader = store.open("k", 1)
    reader.expect(0, 1)

    def use():
        messages = errors(
            lambda: store.put("k", [b"y"]),
            lambda: store.put("k", [bytes(2**24)]),
            lambda: store.create("k", b"y"),
            lambda: store.create("k", [bytes(2**24)]),
            lambda: store.get("k"),
            lambda: store.open("k"),
            lambda: store.open("k", 1).read_into(0, memoryview(bytearray(1))),
            lambda: reader.read_into(0, memoryview(bytearray(1))),
            lambda: store.list(""),
            lambda: store.delete(["k"]),
            lambda: store.background.submit(list),
        )
        store.close()
        return messages

    messages = forked(use)
    uri = f"{scheme.rpartition('+')[2]}://bucket/run"
    for message in messages:
        assert message.startswith(
            f"{uri} was opened in another process ({os.getpid()}), from which"
        )
        assert "Connect after forking, or start processes by spawn" in message
    assert len(messages) == 11
    assert store.get("k") == b"x"
    assert store.background.submit(lambda: 7).result() == 7
    store.close()


def test_obstore_cannot_be_begun_with_again(small_s3):
    store = open_store("obstore+s3://bucket/run")
    (message,) = forked(lambda: errors(lambda: open_store("obstore+s3://bucket/run")))
    assert f"obstore was used in process {os.getpid()} before this one" in message
    assert "use fsspec+s3://" in message
    store.put("k", [b"x"])
    store.close()


def test_s3fs_and_folders_can(small_s3, tmp_path):
    for uri in ("fsspec+s3://bucket/run", str(tmp_path)):
        with_parent = open_store(uri)
        with_parent.put("k", [b"x"])
        assert forked(lambda uri=uri: open_store(uri).get("k")) == b"x"
        with_parent.close()


def test_a_forked_process_connects_by_itself(tmp_path):
    exchange = connect(tmp_path, rank=0, world_size=1)
    assert connect(tmp_path, rank=0, world_size=1) is exchange
    module = sys.modules["diloco_core._connect"]
    with module._lock:  # as another thread would
        assert forked(lambda: connect(tmp_path, rank=0, world_size=1) is exchange) is False
    assert connect(tmp_path, rank=0, world_size=1) is exchange
    exchange.leave()
