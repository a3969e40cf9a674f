"""Records and the headers of files: no bit can change unseen, and no other version is misread."""

import json

import pytest
import torch
from damage_lab import InMemory, flip
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from diloco_core import ConfigurationError, CorruptedObjectError, FormatError
from diloco_core._store._api import RECORD_BYTES
from diloco_core._wire._safetensors import (
    LENGTH_BYTES,
    SAFETENSORS_DTYPES,
    entry,
    header_bytes,
    header_size,
    parse_header,
    read_header,
)
from diloco_core._wire._sealed import FORMAT, _checksum, seal, unseal

KEY = "commits/00000001.json"
RECORD = seal("commit", KEY, {"sync": 1, "members": [{"rank": 0, "to": 20}]})

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.text().filter(lambda name: name not in {"kind", "format", "xxh3_128"}), JSON
)


@given(kind=st.text(), key=st.text(), fields=FIELDS)
def test_what_was_sealed_is_read(kind, key, fields):
    assert unseal(kind, key, seal(kind, key, fields), "x") == fields


def test_what_no_replica_would_read_is_not_written():
    bare = len(seal("manifest", KEY, {"names": ""}))
    largest = seal("manifest", KEY, {"names": "x" * (RECORD_BYTES - bare)})
    assert len(largest) == RECORD_BYTES
    assert unseal("manifest", KEY, largest, "x")
    with pytest.raises(ConfigurationError, match=r"67108865 bytes, .* too many tensors"):
        seal("manifest", KEY, {"names": "x" * (RECORD_BYTES - bare + 1)})


def test_every_bit_and_every_truncation_of_a_record_is_noticed():
    for position in range(8 * len(RECORD)):
        with pytest.raises((CorruptedObjectError, FormatError)):
            unseal("commit", KEY, flip(RECORD, position), "x")
    for size in range(len(RECORD)):
        with pytest.raises(CorruptedObjectError):
            unseal("commit", KEY, RECORD[:size], "x")


def test_a_record_in_the_place_of_another_is_refused():
    with pytest.raises(CorruptedObjectError, match="written under another key"):
        unseal("commit", "commits/00000002.json", RECORD, "x")
    with pytest.raises(CorruptedObjectError, match="of kind 'commit', not 'done'"):
        unseal("done", KEY, RECORD, "x")


@pytest.mark.parametrize("fields", [{"kind": "x" * 10**6}, {"format": "9" * 10**6}])
def test_what_a_record_says_it_is_is_shown_in_part(fields):
    whole = {"kind": "commit", "format": FORMAT, **fields}
    data = seal("commit", KEY, {}).replace(
        f' "kind": "commit",\n "format": {FORMAT}'.encode(),
        ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in whole.items()).encode(),
    )
    body = data[: data.rindex(b',\n "xxh3_128"')]
    sealed = b'%s,\n "xxh3_128": "%s"\n}\n' % (body, _checksum(body, KEY).encode())
    with pytest.raises((CorruptedObjectError, FormatError)) as error:
        unseal("commit", KEY, sealed, "x")
    assert len(str(error.value)) < 400
    assert next(iter(fields.values()))[:20] in str(error.value)


@pytest.mark.parametrize("old", [b'{\n "format": 2,\n "sync": 1\n}', b'{"format": 1, "sync": 1}'])
def test_a_record_of_an_older_version_is_refused_by_name(old):
    with pytest.raises(FormatError, match=r"x has format [12], and this version of diloco-core"):
        unseal("commit", KEY, old, "x")


def test_a_record_of_a_newer_version_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("diloco_core._wire._sealed.FORMAT", FORMAT + 1)
    newer = seal("commit", KEY, {})
    monkeypatch.undo()
    with pytest.raises(FormatError, match=f"has format {FORMAT + 1}"):
        unseal("commit", KEY, newer, "x")


@pytest.mark.parametrize("other", [b"", b"[" * 100_000, b"null", b"\xff\xfe", b"{}", bytes(64)])
def test_anything_else_is_refused(other):
    with pytest.raises(CorruptedObjectError):
        unseal("commit", KEY, other, "x")


def test_a_record_has_a_largest_size():
    with pytest.raises(CorruptedObjectError, match="at most"):
        unseal("commit", KEY, bytes(RECORD_BYTES + 1), "x")


def test_no_number_is_written_that_is_none():
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal("commit", KEY, {"loss": float("nan")})


LOADABLE = [dtype for dtype in SAFETENSORS_DTYPES if not dtype.is_complex]


@given(
    st.lists(
        st.tuples(st.sampled_from(LOADABLE), st.lists(st.integers(0, 4), max_size=3)), max_size=4
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3),
)
def test_the_library_reads_what_is_written(tensors, metadata):
    entries, data = {}, b""
    for number, (dtype, shape) in enumerate(tensors):
        values = bytes(torch.Size(shape).numel() * dtype.itemsize)
        entries[str(number)] = entry(dtype, shape, len(data), len(data) + len(values))
        data += values
    header = header_bytes(entries, metadata)
    loaded = load(header + data)
    found = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in loaded.items()}
    assert found == {str(number): described for number, described in enumerate(tensors)}
    assert len(header) % 64 == 0
    assert header_size(header + data) == len(header)
    assert read_header(InMemory(header + data, "x"), "x") == (header, parse_header(header + data))
    assert parse_header(header)["__metadata__"] == metadata
    assert int.from_bytes(header[:LENGTH_BYTES], "little") == len(header) - LENGTH_BYTES


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "x has 0 bytes: it is truncated"),
        (b"1234567", "x has 7 bytes: it is truncated"),
        ((9).to_bytes(8, "little") + b"{}", "x does not begin with the header of a safetensors"),
        ((2**20 + 1).to_bytes(8, "little") + bytes(2**20 + 1), "does not begin with the header"),
        ((2).to_bytes(8, "little") + b"[]", "the header of x is damaged"),
        ((2).to_bytes(8, "little") + b"{]", "the header of x is damaged"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "the header of x is damaged"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "the header of x is damaged"),
    ],
)
def test_what_is_no_header_is_refused(data, text):
    with pytest.raises(CorruptedObjectError, match=text):
        read_header(InMemory(data, "x"), "x")
