"""The file of a contribution: its bytes, its size, and that what is read was verified."""

import hashlib
import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from codecs_lab import CODECS
from damage_lab import InMemory, flip
from safetensors.torch import load

from diloco_core import CorruptedObjectError
from diloco_core._arithmetic._clip import measure_norms
from diloco_core._arithmetic._layout import Rule
from diloco_core._arithmetic._sharded import Scratch
from diloco_core._model._partition import NamedTensor
from diloco_core._outer._fragment import Fragment
from diloco_core._outer._optimizer import OuterOptimizer
from diloco_core._terms._terms import Terms
from diloco_core._wire import _delta
from diloco_core._wire._delta import DeltaFormat
from diloco_core._wire._safetensors import header_size

ALL = 0b111
SUMMED = 64
RANKS = 3


@pytest.fixture(autouse=True)
def every_few_values_have_a_checksum(monkeypatch):
    monkeypatch.setattr(_delta, "SUMMED_BYTES", SUMMED)


class Name(NamedTuple):
    key: str = "deltas/00000003/x"
    rank: int = 1
    groups: int = ALL


NAME = Name()


def fragment(clip=True, codec="plain", shards=RANKS):
    """Groups of all rules, of which one replica has changed all values."""
    tensors = [
        NamedTensor("count", torch.arange(35), Rule.FIRST),
        NamedTensor("mean", torch.arange(50.0) / 4, Rule.MEAN),
        NamedTensor("weight", torch.nn.Parameter(torch.arange(110.0) / 2), Rule.OUTER),
    ]
    made = Fragment("0", tensors, OuterOptimizer(()), shards, Terms(clip=clip, codec=CODECS[codec]))
    made.take_snapshot()
    with torch.no_grad():
        for each in tensors:
            each.tensor.add_(4)
    made.begin()
    measure_norms(made, 1, Scratch(64))
    return made


def fixed(job):
    """Ranks leave out their own shards, and rank 0 alone sends the first group."""
    return DeltaFormat(
        job,
        omit=lambda rank: range(rank, job.layout.shards, RANKS),
        sends_first=lambda rank: rank == 0,
    )


def elastic(job):
    return DeltaFormat(job, verify_first=False)


FORMATS = {"fixed": fixed, "elastic": elastic}


def written(form, name=NAME, **options):
    return b"".join(map(bytes, form.parts(name, Scratch(16), **options)))


def chunks(job, form, name, shards, chunk_bytes):
    """The chunks that a reader of these shards is asked for."""
    sent = form.sent(name.groups, name.rank)
    return [
        chunk
        for shard in shards
        for chunk in job.layout.chunks(shard, chunk_bytes)
        if sent >> chunk.group & 1
    ]


def empty(job, chunk):
    return torch.empty(chunk.numel, dtype=job.layout.groups[chunk.group].dtype)


def read(job, form, data, shards, name=NAME, chunk_bytes=SUMMED, **options):
    """Read the norms and these shards, which must be right when they are verified at the latest."""
    opened = data if callable(data) else lambda _: InMemory(data, "x")
    with form.reader(name, shards, "x", opened, **options) as reader:
        if job.terms.clip:
            assert reader.norms() == job.contribution.norms
        same = []
        for chunk in chunks(job, form, name, shards, chunk_bytes):
            wanted = job.contributed(chunk, empty(job, chunk))
            same.append(torch.equal(reader.read(empty(job, chunk)), wanted))
            assert same[-1] or not form.verify_first
        for shard in shards:
            reader.verify(shard)
        assert all(same)


@pytest.mark.parametrize(
    ("kind", "clip", "codec", "digest"),
    [
        ("fixed", False, "plain", "b3e385e8ae26fa3dbe630dfa18d23570"),
        ("fixed", True, "plain", "9759c76c31ba78bf4e93c057872e8943"),
        ("elastic", False, "plain", "0f31ea265f89dce9e24b0df08f45d533"),
        ("elastic", True, "bf16", "accf70eee872a5c8162f118efe94a943"),
    ],
)
def test_the_bytes_are_those_of_before(kind, clip, codec, digest):
    """Where another format is meant, it gets another version (FORMAT)."""
    data = written(FORMATS[kind](fragment(clip, codec)))
    assert hashlib.sha256(data).hexdigest()[:32] == digest


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("clip", [False, True])
class TestSizes:
    @pytest.mark.sampled
    @pytest.mark.parametrize("rank", range(RANKS))
    @pytest.mark.parametrize("groups", [0b100, 0b101, 0b110, ALL])
    @pytest.mark.parametrize("shards", [RANKS, 2 * RANKS])
    def test_follow_from_the_groups_and_the_rank(self, kind, clip, rank, groups, shards):
        job = fragment(clip, shards=shards)
        form = FORMATS[kind](job)
        name = Name(rank=rank, groups=groups)
        data = written(form, name)
        assert len(data) == form.size(groups, rank)
        others = [shard for shard in range(shards) if kind == "elastic" or shard % RANKS != rank]
        read(job, form, data, others, name)
        for shard in others:
            read(job, form, data, [shard], name)

    def test_of_what_no_contribution_carries(self, kind, clip):
        assert FORMATS[kind](fragment(clip)).size(0b011) is None


@pytest.mark.parametrize("kind", FORMATS)
def test_other_tools_can_read_the_values(kind):
    job = fragment()
    form = FORMATS[kind](job)
    data = written(form)
    tensors = load(data)
    sections = {number for number in range(RANKS) if kind == "elastic" or number != 1}
    found = {name: values for name, values in tensors.items() if name.startswith("shard.")}
    assert {int(name.split(".")[1]) for name in found} == sections
    for number in sections:
        for piece in chunks(job, form, NAME, [number], 2**20):
            wanted = job.contributed(piece, empty(job, piece))
            assert torch.equal(found[f"shard.{number}.{piece.group}"], wanted)
    assert tensors["norms"].tolist() == list(job.contribution.norms)


@pytest.mark.parametrize("codec", ["plain", "bf16", "int8"])
@pytest.mark.parametrize("chunk_bytes", [4, 40, 64, 100, 128, 2**20])
def test_buffers_of_any_size(codec, chunk_bytes):
    """A reader's chunks may be smaller or larger than those with a checksum."""
    job = fragment(codec=codec)
    form = elastic(job)
    data = written(form)
    whole, found = [], []
    for into, size in ((whole, 2**20), (found, chunk_bytes)):
        reader = form.reader(NAME, range(RANKS), "x", lambda _: InMemory(data, "x"))
        for chunk in chunks(job, form, NAME, range(RANKS), size):
            into += reader.read(empty(job, chunk)).tolist()
    assert found == whole


@pytest.mark.parametrize("kind", FORMATS)
class TestDamage:
    def test_a_bit_of_every_byte(self, kind):
        """It is found; only what nobody uses may change."""
        job = fragment()
        form = FORMATS[kind](job)
        data, unused = written(form), 0
        for byte in range(len(data)):
            try:
                read(job, form, flip(data, 8 * byte + byte % 8), [0, 2])
            except CorruptedObjectError:
                continue
            unused += 1
        sections = range(RANKS) if kind == "elastic" else (0, 2)
        others = [] if kind == "fixed" else chunks(job, form, NAME, [1], SUMMED)
        zeros = sum(
            -sum(job.layout.piece_bytes(piece) for piece in chunks(job, form, NAME, [s], 2**20)) % 8
            for s in sections
        )
        not_read = sum(map(job.layout.piece_bytes, others)) + 8 * len(others)
        assert unused == header_size(data) + zeros + not_read

    def test_every_truncation(self, kind):
        job = fragment()
        form = FORMATS[kind](job)
        data = written(form)
        for size in range(len(data)):
            with pytest.raises(CorruptedObjectError, match=rf"has {size} bytes, but should have"):
                read(job, form, data[:size], [0])

    def test_another_place(self, kind):
        """Two chunks that are as large as each other do not change places unnoticed."""
        job = fragment()
        form = FORMATS[kind](job)
        data = written(form)
        start = header_size(data) + 16  # after the norms
        swapped = data[start + 64 : start + 128] + data[start : start + 64]
        data = data[:start] + swapped + data[start + 128 :]
        with pytest.raises(CorruptedObjectError, match=r"section shard\.0: a checksum is wrong"):
            read(job, form, data, [0])


def test_a_chunk_that_flips_on_the_way_is_read_again():
    """Also the norms and the checksums. Nothing that was handed out before is handed out again."""
    job = fragment()
    form = fixed(job)
    data = written(form)
    start = header_size(data)
    for bit in range(8 * start, 8 * len(data), 61):
        opened, failed = [], []

        def harmed(_, bit=bit, opened=opened):
            opened.append(bit)
            return InMemory(flip(data, bit) if len(opened) == 1 else data, "x")

        def again(read, failed=failed):
            try:
                return read()
            except CorruptedObjectError as error:
                failed.append(error)
                return read()

        read(job, form, harmed, [0, 2], again=again)
        assert len(failed) == len(opened) - 1 <= 1


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_what_is_no_norm_is_refused_although_its_checksum_is_right(norm):
    job = fragment()
    form = elastic(job)
    job.contribution = replace(job.contribution, norms=(norm,))
    data = written(form)
    with pytest.raises(CorruptedObjectError, match="not a finite number"):
        form.reader(NAME, [0], "x", lambda _: InMemory(data, "x")).norms()
