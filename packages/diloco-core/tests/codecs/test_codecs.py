"""Codecs: all replicas add up what was sent, the sender too, and objects have the size that the
codec says.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sync_lab import Halved

from diloco_core import MismatchError, StoreExchange, connect, in_process
from diloco_core._arithmetic._contribution import Contribution
from diloco_core._arithmetic._layout import Group, Layout, Piece, Rule
from diloco_core._arithmetic._sent import sent_bytes
from diloco_core._codecs._codec import is_sparse
from diloco_core._codecs._named import CODECS as NAMED
from diloco_core._codecs._plain import PLAIN
from diloco_core._exchange._base import Schema
from diloco_core._model._partition import NamedTensor
from diloco_core._outer._fragment import Fragment
from diloco_core._outer._optimizer import OuterOptimizer, outer_factory
from diloco_core._terms._terms import OuterGroup, Terms

CODECS = [*NAMED.values(), Halved()]
OTHERS = [codec for codec in CODECS if codec is not PLAIN]
SIZE, BUFFER = 1000, 24
REPLICAS = 3
KINDS = ("in process", "fixed", "sharded", "gather")


def name_of(codec):
    return codec.name


def decoded(codec, values):
    """What the others read where these values were sent."""
    out = torch.empty_like(values)
    codec.decode(codec.encode(values), out)
    return out


class Replica:
    def __init__(self, exchange, codec):
        generator = torch.Generator().manual_seed(exchange.rank)
        self.exchange = exchange
        self.start = torch.linspace(-1.0, 1.0, SIZE)
        self.learned = torch.randn(SIZE, generator=generator)
        self.parameter = torch.nn.Parameter(self.start.clone())
        self.buffer = torch.zeros(BUFFER)
        self.local = torch.rand(BUFFER, generator=generator)
        tensors = [
            NamedTensor("weight", self.parameter, Rule.OUTER),
            NamedTensor("running", self.buffer, Rule.MEAN),
        ]
        outer = OuterOptimizer([OuterGroup(outer_factory(None, 0.5, 0.0, False))])
        shards = exchange.shards(4 * (SIZE + BUFFER))
        self.job = Fragment("0", tensors, outer, shards, Terms(codec=codec))
        self.job.take_snapshot()

    def begin(self):
        self.exchange.join(Schema(self.job.schema(), {"fragments": "1"}, [self.job.table()]))
        if isinstance(self.exchange, StoreExchange):
            self.exchange.restore([self.job])

    def sync(self):
        with torch.no_grad():
            self.parameter -= self.learned
            self.buffer += self.local
        self.job.contribution = Contribution(steps=(0, 1))
        self.job.begin()
        report = self.exchange.sync(self.job)
        self.job.finish()
        return report


def exchanges_of(kind, folder):
    if kind == "in process":
        return in_process(REPLICAS)
    elastic = {} if kind == "fixed" else {"min_replicas": REPLICAS, "topology": kind}
    # Incarnations of an elastic run may cut what they handle as they like.
    chunks = [64, 64, 64] if kind == "fixed" else [64, 256, 2**20]
    return [
        connect(folder, rank=rank, world_size=REPLICAS, chunk_bytes=chunks[rank], **elastic)
        for rank in range(REPLICAS)
    ]


def at_once(act, things):
    with ThreadPoolExecutor(len(things)) as pool:
        return list(pool.map(act, things))


def sync(kind, folder, codec):
    """All replicas after one sync, and their reports."""
    replicas = [Replica(exchange, codec) for exchange in exchanges_of(kind, folder)]
    at_once(Replica.begin, replicas)
    reports = at_once(Replica.sync, replicas)
    sizes = [path.stat().st_size for path in Path(folder).glob("deltas/*/*.safetensors")]
    at_once(lambda replica: replica.exchange.leave(), replicas)
    return replicas, reports, sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_all_add_up_what_was_sent(kind, codec, tmp_path):
    replicas, _, _ = sync(kind, tmp_path / "run", codec)
    # As an exchange does it: the difference of the global copy and the model.
    deltas = [replica.start - (replica.start - replica.learned) for replica in replicas]
    sent = [decoded(codec, delta) for delta in deltas]
    # Zeros of a sparse codec were not sent, and do not count.
    senders = sum(delta != 0 for delta in sent).clamp(min=1) if is_sparse(codec) else REPLICAS
    wanted = replicas[0].start - 0.5 * sum(sent) / senders
    mean = sum(replica.local for replica in replicas) / REPLICAS  # buffers are sent as they are
    for replica in replicas:
        assert torch.equal(replica.parameter, replicas[0].parameter)
        assert torch.allclose(replica.parameter, wanted, rtol=0, atol=1e-6)
        assert torch.allclose(replica.buffer, mean, rtol=0, atol=1e-6)
    if any(not torch.equal(*pair) for pair in zip(sent, deltas, strict=True)):
        # The tolerance above is smaller than what the codec loses.
        assert not torch.allclose(
            wanted, replicas[0].start - 0.5 * sum(deltas) / REPLICAS, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_it_is_the_same_in_every_exchange(kind, codec, tmp_path):
    over_store, _, _ = sync(kind, tmp_path / "run", codec)
    between_threads, _, _ = sync("in process", tmp_path / "none", codec)
    assert torch.equal(over_store[0].parameter, between_threads[0].parameter)


@pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
@pytest.mark.parametrize("codec", OTHERS, ids=name_of)
def test_objects_and_reports_have_the_sizes_that_the_codec_says(kind, codec, tmp_path):
    of_plain, plain, large = sync(kind, tmp_path / "plain", PLAIN)
    of_codec, encoded, small = sync(kind, tmp_path / "encoded", codec)
    saved = outer_bytes(of_plain[0]) - outer_bytes(of_codec[0])
    others = REPLICAS - 1
    # A replica of a fixed run does not send its own shard.
    senders = others if kind == "fixed" else REPLICAS
    headers = 0.2 * sum(large)
    assert abs(sum(large) - sum(small) - senders * saved) < headers
    readers = others * (REPLICAS if kind == "gather" else 1)
    received = [sum(report.bytes_received for report in reports) for reports in (plain, encoded)]
    assert received[0] - received[1] == readers * saved


def outer_bytes(replica):
    """The bytes on the wire of all values that take an outer step."""
    layout, codec = replica.job.layout, replica.job.terms.codec
    return sum(
        sent_bytes(codec, layout, piece)
        for shard in range(layout.shards)
        for piece in layout.shard(shard)
        if layout.groups[piece.group].rule is Rule.OUTER
    )


@pytest.mark.parametrize("kind", ["in process", "fixed", "sharded"])
@pytest.mark.parametrize("other", OTHERS, ids=name_of)
def test_replicas_with_another_codec_are_refused_by_name(kind, other, tmp_path):
    codecs = [PLAIN, other, PLAIN]
    replicas = [
        Replica(exchange, codec)
        for exchange, codec in zip(exchanges_of(kind, tmp_path / "run"), codecs, strict=True)
    ]

    def begin(replica):
        try:
            replica.begin()
        except BaseException as error:
            replica.exchange.abort(error)
            return error

    errors = at_once(begin, replicas)
    assert any(
        isinstance(error, MismatchError) and f"sent as {other.name}" in str(error)
        for error in errors
    )


@given(st.integers(1, 500), st.integers(1, 5), st.integers(16, 512), st.sampled_from(CODECS))
def test_the_bytes_of_a_shard_are_the_same_however_it_is_cut(numel, shards, chunk_bytes, codec):
    values = torch.arange(numel, dtype=torch.float32) / 7
    layout = Layout((Group(torch.float32, numel, Rule.OUTER),), shards, codec.block)
    for shard in range(shards):
        for piece in layout.shard(shard):
            whole = bytes(codec.encode(values[piece.start : piece.stop]).tolist())
            cut = [
                bytes(codec.encode(values[chunk.start : chunk.stop]).tolist())
                for chunk in layout.chunks(shard, chunk_bytes)
            ]
            assert b"".join(cut) == whole
            assert len(whole) == sent_bytes(codec, layout, piece)


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_plain_gives_back_what_it_was_given(numbers):
    values = torch.tensor(numbers)
    out = torch.empty_like(values)
    PLAIN.decode(PLAIN.encode(values), out)
    assert torch.equal(out.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_only_what_takes_an_outer_step_is_encoded(codec):
    layout = Layout(tuple(Group(torch.float32, 32, rule) for rule in Rule), 1)
    sizes = {
        layout.groups[index].rule: sent_bytes(codec, layout, Piece(index, 0, 32))
        for index in range(3)
    }
    encoded = codec.size(torch.float32, 32)
    assert sizes == {Rule.OUTER: encoded, Rule.MEAN: 128, Rule.FIRST: 128}
