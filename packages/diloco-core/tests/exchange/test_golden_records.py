"""The bytes of single records and files, as ``test_golden`` has them of whole runs: those that the
runs there do not write.

The file holds them whole, one character for each byte. Host, process and whatever is drawn at
random are the same every time.
"""

import json
import re
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from codecs_lab import CODECS
from damage_lab import InMemory, flip

import diloco_core
from diloco_core import CorruptedObjectError, ReplicaLostError, Timing
from diloco_core._arithmetic._coded import CodedUpdates, Encoded
from diloco_core._arithmetic._layout import Rule
from diloco_core._arithmetic._rate import Rate, digits
from diloco_core._arithmetic._sharded import Scratch
from diloco_core._export._run_states import unsynced_files
from diloco_core._export._stored import read_fragment
from diloco_core._inner import _state
from diloco_core._inner._file import SavedInner
from diloco_core._model._partition import NamedTensor
from diloco_core._model._unsynced import Unsynced, unsynced_key
from diloco_core._outer._fragment import Fragment
from diloco_core._outer._optimizer import OuterOptimizer
from diloco_core._run import _claims
from diloco_core._run._generations import _carrying, _gathering
from diloco_core._run._incarnation._progress import published_shard
from diloco_core._run._policy._others import Beats, _epoch_of, interval_of, read_beats
from diloco_core._run._records import _keys
from diloco_core._run._records._attendance import Farewell, farewell, read_farewell
from diloco_core._run._records._keys import Delta, Hint, Wish, claim_key, done_key, shard_key
from diloco_core._run._records._manifest import Manifest
from diloco_core._run._records._records import Commit, Done, GivenUp, Rollback, read_record
from diloco_core._run._records._rules import rate_of
from diloco_core._run._repair import ask_for_repair
from diloco_core._run._settings import Fixed, Joiner
from diloco_core._run._start import beginning
from diloco_core._run._sync._sync import StoreSync
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._terms._terms import OuterGroup
from diloco_core._wire._published import WITHOUT, shard_metadata
from diloco_core._wire._sealed import FORMAT

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
RECORDS = {key: text.encode("latin-1") for key, text in GOLDEN.get("records", {}).items()}
SOURCES = Path(diloco_core.__file__).parent

NONCE, BASE, SCHEMA, RUN = "0123456789abcdef", "0" * 16, "f" * 16, "a" * 16
SETTINGS = {"sync_every": "2"}
HOST, PID = "host (0123456789ab)", 77
RATE = Rate((0.5, 0.25), 3, 1, 2)
MEMBERS = (
    Delta(5, 0, 1, 2, 6, BASE, SCHEMA, 5, 4096, digits(RATE.values)),
    Delta(5, 1, 2, 0, 4, BASE, SCHEMA),
)
COMMIT = Commit(5, 0, BASE, "1" * 16, MEMBERS, {0: 6, 1: 4, 2: 3}, 3, 2, RATE, run=RUN)
ROLLBACK = Rollback(6, (3, 4), (5,), {0: 2, 1: 3}, 2, run=RUN)
END = Rollback(7, (3, 4), (), {0: 2, 1: 3}, 6, run=RUN, end=GivenUp(1, 0, "rank 1 is lost"))
DONE = Done(5, 0, (1, 2**63), (5, 6), COMMIT, full=False)
CHOICE = _carrying.Choice(f"generations/000003-{NONCE}/", 4)
LEFT, FAILED, CAUSED = (Hint(5, rank, 2, "leave").key for rank in range(3))
WISH = Wish(6, Rate((0.125, 0.5), 4, 1, 2), SCHEMA)
FRAGMENT = {
    "name": "0", "shards": 2, "fingerprint": "0" * 32,
    "groups": [{"dtype": "torch.float32", "numel": 32, "rule": "outer"}],
    "tensors": [
        {"name": "weight", "group": 0, "start": 0, "shape": [4, 8], "dtype": "torch.float32"}
    ],
}  # fmt: skip
MANIFEST = Manifest(
    run_id="r", writer=1, world_size=2, min_replicas=2, topology="sharded", publish_every=4,
    retention=2, settings={"sync_every": "2", "committed": "3"}, membership="fixed",
    tensors={"weight": "torch.float32 [32] outer"}, fragments=[FRAGMENT], unsynced={},
    initial=NONCE, sums=[[1, 2**63]], rests=[[3, 4]], rate=Rate((0.5,), 2, 1),
)  # fmt: skip
INNER = _keys.inner_key(1, 2, 5)
LACKING, WHOLE, CHANGED = (shard_key(sync, 0, 0, NONCE) for sync in (5, 6, 7))
FROZEN = {"count": [0, 1, 2], "few": [1.0, 0.5]}
CHUNK = 1024
OUTER, SCALARS = {"exp_avg": 0.5, "exp_avg_sq": 0.25}, {"step": 3.0}


class Plain(torch.optim.Optimizer):
    """An optimizer whose state is the same in every version of torch."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.5})


class Loader:
    """State of all kinds that can be saved."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


STATE = {
    "items": [True, None, 0.5, "text", (1, 2)],
    "large": 2**1025,
    7: torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
}


def inner(state=None):
    loader, weight = Loader(state), torch.nn.Parameter(torch.zeros(4))
    return _state.InnerState([Plain([weight])], {"loader": loader}, {id(weight): "weight"}), loader


def shard(sync, start):
    """A fragment's only shard; from sync 6 on encoded as changes by 2, in sync 6 also whole."""
    tensors = [
        NamedTensor("weight", torch.nn.Parameter(start + torch.arange(20.0) / 4), Rule.OUTER),
        NamedTensor("count", torch.arange(3), Rule.FIRST),
    ]
    outer = OuterOptimizer([OuterGroup(lambda chunks: torch.optim.Adam(chunks, lr=0.5))])
    coded = CodedUpdates(CODECS["bf16"], 2, 1) if sync > 5 else None
    job = Fragment("0", tensors, outer, 1, coded=coded)
    job.take_snapshot()
    job.begin()
    for piece in job.layout.chunks(0, CHUNK):
        if job.layout.groups[piece.group].rule is Rule.OUTER:
            state = {name: torch.full((piece.numel,), value) for name, value in OUTER.items()}
            job.install_outer({piece: state}, SCALARS)
            if coded:
                encoded = {name: coded.codec.encode(tensor) for name, tensor in state.items()}
                update = coded.codec.encode(torch.full((piece.numel,), 2.0))
                coded.chunks[piece] = Encoded(update, encoded)
    return job, published_shard(job, sync, 0, RUN, CHUNK)


def put(store, key, parts):
    store.put(key, lambda: [b"".join(map(bytes, parts))])


class Frozen(torch.nn.Module):
    """Tensors that are not synced."""

    def __init__(self):
        super().__init__()
        self.register_buffer("few", torch.tensor(FROZEN["few"], dtype=torch.float16))
        self.register_buffer("count", torch.tensor(FROZEN["count"]))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty store, for the same process every time, which draws the same random numbers."""
    monkeypatch.setattr("secrets.token_hex", lambda size: NONCE)
    monkeypatch.setattr("os.getpid", lambda: PID)
    for module in (_claims, _gathering):
        monkeypatch.setattr(module, "host_name", lambda: HOST)
        monkeypatch.setattr(module, "is_gone", lambda *process: process == (PID, HOST))
    random = {"torch": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    monkeypatch.setattr(_state, "random_state", lambda: random)
    monkeypatch.setattr(_state, "set_random_state", lambda state: None)
    opened = open_store(str(tmp_path / "run"))
    yield Patient(opened, Timing(sleep=bool, repeat=lambda seconds, act: bool))
    opened.close()


def write(store):
    with beginning(store, Joiner(1, 2, "r", Fixed(2, 60.0), 1024)):
        sign = store.get(_keys.BEGINNING)
    put(store, _keys.BEGINNING, [sign])
    _claims.claim(store, 1, RUN)
    _claims.claim(store, 1, RUN, SETTINGS)
    Beats(store.store, 1, "3", RUN, store.timing).start()
    ask_for_repair(SimpleNamespace(store=store, rank=1, epoch=2, recorded=lambda: [4]))
    incarnation = SimpleNamespace(store=store, rank=1, epoch=2, standing=SimpleNamespace(rate=RATE))
    at = SimpleNamespace(schema=SCHEMA)
    asking = SimpleNamespace(_incarnation=incarnation, _sync=6, _round=at)
    StoreSync._ask(asking, WISH.rate.values)
    put(store, LEFT, [farewell(LEFT, None)])
    put(store, FAILED, [farewell(FAILED, ValueError("no more data"), 1)])
    put(store, CAUSED, [farewell(CAUSED, ReplicaLostError("rank 1 is lost", 1), 2, final=True)])
    for record in (COMMIT, ROLLBACK, END):
        put(store, _keys.commit_key(record.sync), [record.to_json()])
    put(store, _keys.done_key(5, 0), [DONE.to_json()])
    table = Unsynced(Frozen(), ()).publish(store.put)
    put(store, _keys.MANIFEST, [replace(MANIFEST, unsynced=table).to_json()])
    gathering = _gathering.Gathering(store, 1, 2)
    gathering._said, gathering._number = ["", NONCE], 3
    gathering._say()
    _carrying.write_choice(store, CHOICE)
    nothing = SimpleNamespace(list=lambda folder: [])
    manifest = SimpleNamespace(world_size=2, first=0)
    _carrying.carry(SimpleNamespace(manifest=manifest, fragments=[], store=nothing), store, 0, 1)
    put(store, INNER, inner(STATE)[0].parts(6, INNER, 2))
    for sync, key in ((5, LACKING), (6, WHOLE), (7, CHANGED)):
        job, one = shard(sync, 2.0)
        put(store, key, one.parts(shard_metadata(job, sync, "1.2" if sync == 5 else "")))


def test_everything_is_written_as_before(store, tmp_path):
    write(store)
    keys = store.list("")
    written = {key: (tmp_path / "run" / key).read_bytes() for key in keys}
    assert GOLDEN["format"] == FORMAT
    assert {key: data.decode("latin-1") for key, data in written.items()} == GOLDEN["records"]


def log_record(record):
    key = _keys.commit_key(record.sync)
    return key, lambda store: read_record(store.get(key), record.sync, key), record


def manifest(store):
    return replace(Manifest.from_json(store.get(_keys.MANIFEST), ""), unsynced={})


def ending(key, *said):
    return key, lambda store: read_farewell(key, store.get), Farewell(*said)


def hint(sync):
    wanted = Hint(sync, 1, 2, "repair")
    return wanted.key, lambda store: [*map(Hint.parse, store.list("deltas/"))], [wanted]


def beat(store):
    (read,) = read_beats(store, [1])
    return interval_of(read), _epoch_of(read), read.split()[0].decode()


def saved_inner(store):
    data, (state, loader) = store.get(INNER), inner()
    saved = SavedInner(5, INNER, INNER, data)
    return state.restore(data, INNER, INNER), saved.rollback(), repr(loader.state)


def loaded(sync, lacks=None):
    """Return how a shard is read where the values are 2 less, and what comes of it."""
    key = shard_key(sync, 0, 0, NONCE)

    def read(store):
        file = InMemory(store.get(key), key)
        job, one = shard(sync, 0.0)
        one.load(file, key, Scratch(CHUNK))
        metadata, chunks, scalars = one.described(file, key)
        states = (each for state in chunks.values() for each in state.items())
        outer = [(name, set(tensor.tolist())) for name, tensor in states]
        return [each.tolist() for each in job.copy], outer, scalars, metadata.get(WITHOUT)

    values = [[0, 1, 2], [2 + number / 4 for number in range(20)]]
    return key, read, (values, [(name, {value}) for name, value in OUTER.items()], SCALARS, lacks)


def unsynced(store):
    """Return what export() finds in the object, by name."""
    table = Manifest.from_json(RECORDS[_keys.MANIFEST], "").unsynced
    fragment, files = unsynced_files(table)
    read_fragment(store.store, fragment, files)
    return {name: tensor.tolist() for name, tensor in fragment.tensors(None).items()}


#: By key, how an object is read, and what comes of it.
READ = {
    key: (read, wanted)
    for key, read, wanted in (
        # Only that they are there says something.
        (_keys.BEGINNING, lambda store: bool(store.peek(_keys.BEGINNING)), True),
        ("carried/00001", lambda store: _carrying.not_carried(store, 2), [0]),
        hint(4),
        hint(5),
        (WISH.key, lambda store: rate_of(RATE, store.list("deltas/"), SCHEMA), WISH.rate),
        log_record(COMMIT),
        log_record(ROLLBACK),
        log_record(END),
        (done_key(5, 0), lambda store: Done.from_json(store.get(done_key(5, 0)), 5, 0, ""), DONE),
        (_keys.MANIFEST, manifest, MANIFEST),
        ending(LEFT, "left"),
        ending(FAILED, "failed", "ValueError: no more data"),
        ending(CAUSED, "failed", "ReplicaLostError: rank 1 is lost", 1, True),
        (claim_key(1, 1), lambda store: _claims.incarnation_is_gone(store, 1, 1), True),
        (claim_key(1, 2), lambda store: _claims.claimed_settings(store, 1, 2), SETTINGS),
        (_keys.beat_key(1), beat, (10.0, 3, RUN)),
        (
            _gathering.meeting_key(1),
            lambda store: _gathering.Gathering(store, 1, 2)._read(1),
            _gathering._Word(NONCE, ["", NONCE], 3, 10, HOST, PID, RECORDS["meetings/00001.json"]),
        ),
        ("carried.json", _carrying.read_choice, CHOICE),
        (INNER, saved_inner, (6, 2, repr(STATE))),
        loaded(5, "1.2"),
        loaded(6),
        loaded(7),
        (unsynced_key(f"unsynced/{NONCE}", 0), unsynced, FROZEN),
    )
}


@pytest.mark.parametrize("key", RECORDS)
def test_what_was_written_before_is_read(store, key):
    put(store, key, [RECORDS[key]])
    read, wanted = READ[key]
    assert read(store) == wanted


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("sync", "key"), [(6, WHOLE), (7, CHANGED)])
def test_every_bit_of_an_encoded_shard_is_covered(sync, key, step):
    """And it is not taken for that of another sync."""
    data = RECORDS[key]

    def check(data, sync=sync):
        return shard(sync, 2.0)[1].check(InMemory(data, "x"), "x", Scratch(CHUNK))

    assert check(data)
    damaged = [flip(data, bit) for bit in range(0, 8 * len(data), step)]
    for harmed in (*damaged, *(data[:size] for size in range(0, len(data), step))):
        with pytest.raises(CorruptedObjectError):
            check(harmed)
    with pytest.raises(CorruptedObjectError):
        check(data, sync + 2)


def test_every_kind_of_record_and_file_has_its_bytes():
    """Those of contributions are among those of whole runs."""
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    for written, stored in ((r'\bseal\("(\w+)"', r'"kind": "(\w+)"'), (r'"diloco": "(\w+)"',) * 2):
        kinds = set(re.findall(written, code)) - {"delta"}
        held = "".join(GOLDEN["records"].values()).replace('":"', '": "')
        assert len(kinds) >= 3
        assert kinds == set(re.findall(stored, held))


def test_every_kind_of_key_is_among_them():
    keys = [key for name, objects in GOLDEN.items() if name != "format" for key in objects]
    assert {value for value in vars(_keys).values() if str(value).endswith(".json")} <= set(keys)
    kinds = [
        kind for kind in vars(_keys).values() if hasattr(kind, "parse") and hasattr(kind, "key")
    ]
    assert [kind for kind in kinds if not any(map(kind.parse, keys))] == []
    hints = _keys._HINT.pattern.rpartition("(")[2].rstrip(")").split("|")
    assert {hint.event for hint in filter(None, map(Hint.parse, keys))} == set(hints)


def test_every_field_that_may_be_left_out_is_in_one_of_them():
    results = {}

    def look(value):
        if is_dataclass(value):
            defaults = {
                field.name: field.default for field in fields(value) if field.default is not MISSING
            }
            inside = [getattr(value, field.name) for field in fields(value)]
        elif isinstance(value, (tuple, list)):
            defaults, inside = getattr(value, "_field_defaults", {}), value
        else:
            return
        for name, default in defaults.items():
            place = f"{type(value).__name__}.{name}"
            results[place] = results.get(place, False) or getattr(value, name) != default
        for each in inside:
            look(each)

    look([wanted for _, wanted in READ.values()])
    assert len(results) >= 16
    assert [place for place, given in results.items() if not given] == []
