"""Shards and chunks cover every element exactly once, and files of them are valid safetensors."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from diloco_core._arithmetic._layout import Group, Layout, Piece, Rule
from diloco_core._arithmetic._sharded import Scratch
from diloco_core._store._open import open_store
from diloco_core._wire._safetensors import SAFETENSORS_DTYPES
from diloco_core._wire._sections import (
    Section,
    SectionReader,
    header,
    section_parts,
    section_starts,
    view,
)

unhurried = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # load is no failure

groups = st.lists(
    st.builds(
        Group, st.sampled_from(list(SAFETENSORS_DTYPES)), st.integers(0, 200), st.just(Rule.MEAN)
    ),
    max_size=4,
).map(lambda found: tuple(sorted(found, key=lambda group: -group.dtype.itemsize)))
layouts = st.builds(Layout, groups, st.integers(1, 7))


@unhurried
@given(layouts, st.integers(1, 300))
def test_every_element_is_in_one_chunk_of_one_shard(layout, chunk_bytes):
    seen = [[0] * group.numel for group in layout.groups]
    for shard in range(layout.shards):
        for chunk in layout.chunks(shard, chunk_bytes):
            least = layout.groups[chunk.group].dtype.itemsize
            assert layout.piece_bytes(chunk) <= max(chunk_bytes, least)
            for element in range(chunk.start, chunk.stop):
                seen[chunk.group][element] += 1
        counted = sum(layout.chunk_count(piece, chunk_bytes) for piece in layout.shard(shard))
        assert counted == len(list(layout.chunks(shard, chunk_bytes)))
    assert all(count == 1 for counts in seen for count in counts)
    for index in range(len(layout.groups)):  # and the shards are of about equal size
        bounds = [layout.bound(index, shard) for shard in range(layout.shards + 1)]
        sizes = [stop - start for start, stop in pairwise(bounds)]
        assert max(sizes) - min(sizes) <= 32


def _bytes(size):
    return (torch.arange(size) * 37 % 2).to(torch.uint8)  # booleans are 0 and 1


def _file(layout, seeds=(1, 2, 3, 4, 5, 6, 7)):
    """A file with one section per shard, and the values in it."""
    values = [_bytes(each.numel * each.dtype.itemsize).view(each.dtype) for each in layout.groups]
    sections = [Section(f"shard.{k}", layout.shard(k), seeds[k]) for k in range(layout.shards)]
    parts = [header(layout, sections, {"diloco": "test"})]
    for k, section in enumerate(sections):
        chunks = (values[c.group][c.start : c.stop] for c in layout.chunks(k, 64))
        parts += [bytes(part) for part in section_parts(section, chunks)]
    return b"".join(parts), sections, values


def _read(data, layout, sections, index):
    store = open_store("memory://hypothesis/wire")
    store.put("k", [data])
    with store.open("k") as reader:
        starts = section_starts(layout, sections)
        start = reader.size - starts[-1] + starts[index]
        section = SectionReader(reader, layout, sections[index], start, "k")
        found = []
        for chunk in layout.chunks(index, 48):
            out = torch.empty(chunk.numel, dtype=layout.groups[chunk.group].dtype)
            section.read(out)
            found.append((chunk, out))
        section.verify()
    return found


@unhurried
@given(layouts)
def test_a_file_is_valid_safetensors_and_every_section_reads_back(layout):
    data, sections, values = _file(layout)
    tensors = load(data)
    for k in range(layout.shards):
        for piece in layout.shard(k):
            found = tensors[f"shard.{k}.{piece.group}"]
            wanted = values[piece.group][piece.start : piece.stop]
            assert (found.dtype, view(found)) == (wanted.dtype, view(wanted))
        for chunk, out in _read(data, layout, sections, k):
            assert view(out) == view(values[chunk.group][chunk.start : chunk.stop])


@pytest.mark.parametrize("dtype", list(SAFETENSORS_DTYPES))
def test_a_view_shares_memory(dtype):
    """Also of dtypes that numpy does not know."""
    tensor = torch.zeros(2, 3, dtype=dtype)
    data = view(tensor)
    assert (data.format, data.ndim, len(data)) == ("B", 1, tensor.nbytes)
    last = torch.ones(1, dtype=dtype).view(torch.uint8)
    data[-len(last) :] = bytes(last.tolist())
    assert tensor.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert len(view(tensor[:0])) == 0


def test_buffers_outlive_inference_mode():
    layout, scratch = Layout((Group(torch.float32, 32, Rule.MEAN),), 1), Scratch(64)
    with torch.inference_mode():
        scratch.tensor(0, layout, Piece(0, 0, 32)).fill_(1.0)  # larger than the buffer was
    assert scratch.tensor(0, layout, Piece(0, 0, 32)).add_(1.0).eq(2.0).all()
