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


@given(st.integers(-(2**63), 2**63 - 1), st.booleans())
def test_delete_options(seconds, orphan):
    raw = (
        varint(1 << 3)
        + varint(seconds % 2**64)
        + varint(3 << 3)
        + varint(int(orphan))
        + text(4, "Foreground")
    )
    raw += text(2, text(1, "u")) + text(5, "All")
    assert _protobuf.decode(envelope("DeleteOptions", raw)) == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "gracePeriodSeconds": seconds,
        "orphanDependents": orphan,
        "propagationPolicy": "Foreground",
        "preconditions": {"uid": "u"},
        "dryRun": ["All"],
    }


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", 400),
        (envelope("CronJob", b""), 415),
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
    b"k8s\x00\n\x13\n\x02v1\x12\rResourceQuota\x12=\n\x11\n\x01q"
    + META
    + b"\x12&\n\n\n\x03cpu\x12\x03\n\x012\n\x0c\n\x04pods\x12\x04\n\x0212\x12\nBestEffort\x1a\x00"
    b'\x1a\x00"\x00': {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q"},
        "spec": {"hard": {"cpu": "2", "pods": "12"}, "scopes": ["BestEffort"]},
    },
    b"k8s\x00\n\x0f\n\x02v1\x12\tConfigMap\x12\x1b\n\x11\n\x01m"
    + META
    + b'\x12\x06\n\x01a\x12\x01b\x1a\x00"\x00': {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "m"},
        "data": {"a": "b"},
    },
    b"k8s\x00\n\x14\n\x02v1\x12\x0eServiceAccount\x12\x13\n\x11\n\x01a" + META + b'\x1a\x00"\x00': {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "a"},
    },
    b"k8s\x00\n\x0f\n\x08batch/v1\x12\x03Job\x12\x80\x01\n\x11\n\x01j"
    + META
    + b"\x12a2_\n\x10\n\x00"
    + META
    + b"\x12K\x12(\n\x01j\x12\x05any:1\x1a\x04echo\x1a\x02hi*\x00B\x00j\x00r\x00\x80\x01\x00"
    b"\x88\x01\x00\x90\x01\x00\xa2\x01\x00"
    + b"\x1a\x05Never2\x00B\x00J\x00R\x00X\x00`\x00h\x00\x82\x01\x00\x8a\x01\x00\x9a\x01\x00"
    b"\xc2\x01\x00" + b'\x1a\x08 \x00(\x000\x00:\x00\x1a\x00"\x00': {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j"},
        "spec": {
            "template": {
                "metadata": {},
                "spec": {
                    "containers": [{"name": "j", "image": "any:1", "command": ["echo", "hi"]}],
                    "restartPolicy": "Never",
                },
            }
        },
    },
}


@pytest.mark.parametrize("body", RECORDED)
def test_what_kubectl_sends(body):
    assert _protobuf.decode(body) == RECORDED[body]
