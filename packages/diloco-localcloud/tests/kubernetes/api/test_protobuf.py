"""The bodies that kubectl sends as protobuf."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_localcloud._kubernetes._api import _protobuf
from diloco_localcloud._kubernetes._objects._refusals import ApiError


def varint(number):
    out = b""
    while True:
        out += bytes([(number & 0x7F) | (0x80 if number > 0x7F else 0)])
        number >>= 7
        if not number:
            return out


def text(number, value):
    data = value if isinstance(value, bytes) else value.encode()
    return varint(number << 3 | 2) + varint(len(data)) + data


def envelope(kind, raw):
    meta = text(1, "v1") + text(2, kind)
    return b"k8s\x00" + text(1, meta) + text(2, raw)


@given(st.text(), st.text(), st.text(max_size=300))
def test_access_reviews(verb, resource, namespace):
    attributes = text(1, namespace) + text(2, verb) + text(5, resource)
    found = _protobuf.decode(envelope("SelfSubjectAccessReview", text(2, text(1, attributes))))
    wanted = {"namespace": namespace, "verb": verb, "resource": resource}
    assert found["spec"]["resourceAttributes"] == {k: v for k, v in wanted.items() if v}


@given(st.integers(-(2**63), 2**63 - 1))
def test_evictions(seconds):
    options = varint(1 << 3) + varint(seconds % 2**64) + text(4, "Foreground") + text(5, "All")
    assert _protobuf.decode(envelope("Eviction", text(2, options))) == {
        "apiVersion": "v1",
        "kind": "Eviction",
        "deleteOptions": {
            "gracePeriodSeconds": seconds,
            "propagationPolicy": "Foreground",
            "dryRun": ["All"],
        },
    }


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", 400),
        (envelope("CronJob", b""), 415),
        (envelope("Job", b""), 415),
        (envelope("Secret", text(1, "") + text(9, "a field that kubectl does not send")), 415),
        (b"k8s\x00" + b"\x80" * 100, 400),
        (b"k8s\x00\x0a\xff", 400),
        (b"k8s\x00\x0a\x05ab", 400),
    ],
)
def test_what_cannot_be_decoded(body, code):
    with pytest.raises(ApiError) as caught:
        _protobuf.decode(body)
    assert caught.value.code == code


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_refused(data):
    with contextlib.suppress(ApiError):  # any other exception fails
        assert _protobuf.decode(b"k8s\x00" + data)["kind"] in _protobuf._KINDS


# As kubectl 1.32 sent them.
META = b'\x12\x00\x1a\x00"\x00*\x002\x008\x00B\x00'
RECORDED = {
    b"k8s\x00\n\x0f\n\x02v1\x12\tNamespace\x12\x1a\n\x12\n\x02n1"
    + META
    + b'\x12\x00\x1a\x02\n\x00\x1a\x00"\x00': {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "n1"},
    },
    b"k8s\x00\n\x0c\n\x02v1\x12\x06Secret\x12\x1d\n\x11\n\x01s"
    + META
    + b'\x12\x06\n\x01p\x12\x01q\x1a\x00\x1a\x00"\x00': {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "data": {"p": "cQ=="},
    },
    b"k8s\x00\n\x0f\n\x02v1\x12\tConfigMap\x12\x1b\n\x11\n\x01m"
    + META
    + b'\x12\x06\n\x01a\x12\x01b\x1a\x00"\x00': {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "m"},
        "data": {"a": "b"},
    },
}


@pytest.mark.parametrize("body", RECORDED)
def test_what_kubectl_sends(body):
    assert _protobuf.decode(body) == RECORDED[body]
