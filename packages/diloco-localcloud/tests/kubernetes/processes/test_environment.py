"""``$(NAME)``, paths of volumes and variables from everywhere: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_localcloud._kubernetes._control._content import MountError
from diloco_localcloud._kubernetes._objects._resources import CONFIG_MAPS, SECRETS
from diloco_localcloud._kubernetes._objects._store import Store
from diloco_localcloud._kubernetes._processes._environment import (
    ConfigError,
    expand,
    field,
    resolve,
)
from diloco_localcloud._kubernetes._processes._volumes import make, rewrite

KNOWN = {"A": "1", "B": "$(A)", "long_name": "x y"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$(A)", "1"),
        ("-$(A)-$(A)-", "-1-1-"),
        ("$(B)", "$(A)"),
        ("$(long_name)", "x y"),
        ("$(NO)", "$(NO)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$$$$", "$$"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
        ("$()", "$()"),
    ],
)
def test_expansion(text, result):
    assert expand(text, KNOWN) == result


@given(st.text(alphabet="$()AB x"))
def test_doubled_dollars_protect_any_text(text):
    assert expand(text.replace("$", "$$"), KNOWN) == text


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/data", "/tmp/v"),
        ("/data/a/b", "/tmp/v/a/b"),
        ("--out=/data/a", "--out=/tmp/v/a"),
        ("echo hi > /dev/termination-log", "echo hi > /tmp/t"),
        ("file:///data", "file:///data"),
        ("/database", "/database"),
        ("/other/data", "/other/data"),
        ("/data-2", "/data-2"),
        ("/data/deep", "/tmp/w"),
        ("a:/data:/b", "a:/tmp/v:/b"),
    ],
)
def test_paths_are_rewritten_as_a_whole(text, result):
    known = {"/data": "/tmp/v", "/dev/termination-log": "/tmp/t", "/data/deep": "/tmp/w"}
    assert rewrite(text, known) == result
    assert rewrite(text, {}) == text


@pytest.fixture
def store():
    made = Store(lambda: "2026-01-01T00:00:00Z", 0)
    config = {"metadata": {"name": "conf", "namespace": "ns"}, "data": {"lr": "0.1", "steps": "5"}}
    secret = {"metadata": {"name": "keys", "namespace": "ns"}, "data": {"key": "c2VjcmV0"}}
    binary = {"metadata": {"name": "binary", "namespace": "ns"}, "data": {"key": "//4="}}
    made.add(SECRETS, made.prepare(SECRETS, binary))
    made.add(CONFIG_MAPS, made.prepare(CONFIG_MAPS, config))
    made.add(SECRETS, made.prepare(SECRETS, secret))
    return made


POD = {
    "metadata": {
        "name": "p",
        "namespace": "ns",
        "uid": "u",
        "labels": {"a/b": "c"},
        "annotations": {"n": "m"},
    },
    "spec": {"nodeName": "here", "serviceAccountName": "me"},
    "status": {"podIP": "127.0.0.1"},
}


def env_of(store, env, **more):
    return resolve(store, POD, {"name": "main", "env": env, **more}, {"PATH": "/bin"})


def test_variables_from_everywhere(store):
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)/$(lr)/$(C)"},
        {"name": "C", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}},
        {"name": "D", "valueFrom": {"configMapKeyRef": {"name": "conf", "key": "steps"}}},
        {"name": "E", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a/b']"}}},
        {"name": "H", "valueFrom": {"secretKeyRef": {"name": "no", "key": "no", "optional": True}}},
        {"name": "PATH", "value": "/mine:$(PATH)"},
    ]
    found = env_of(
        store,
        env,
        envFrom=[
            {"configMapRef": {"name": "conf"}},
            {"secretRef": {"name": "keys"}, "prefix": "S_"},
        ],
    )
    assert found == {
        "PATH": "/mine:/bin",
        "lr": "0.1",
        "steps": "5",
        "S_key": "secret",
        "A": "1",
        "B": "1/0.1/$(C)",  # only what stands before is known
        "C": "secret",
        "D": "5",
        "E": "c",
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "p"),
        ("metadata.namespace", "ns"),
        ("metadata.uid", "u"),
        ("metadata.annotations['n']", "m"),
        ("metadata.annotations['none']", ""),
        ("spec.nodeName", "here"),
        ("spec.serviceAccountName", "me"),
        ("status.podIP", "127.0.0.1"),
    ],
)
def test_downward_api(path, value):
    assert field(POD, path) == value


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"secretKeyRef": {"name": "no", "key": "k"}}, 'secret "no" not found'),
        (
            {"configMapKeyRef": {"name": "conf", "key": "k"}},
            "couldn't find key k in ConfigMap ns/conf",
        ),
        (
            {"secretKeyRef": {"name": "binary", "key": "key"}},
            "key in Secret ns/binary is not UTF-8",
        ),
        ({"fieldRef": {"fieldPath": "status.phase"}}, "unsupported fieldPath: status.phase"),
        (
            {"resourceFieldRef": {"resource": "limits.cpu"}},
            "does not support the environment source resourceFieldRef",
        ),
    ],
)
def test_what_is_missing_is_named(store, source, message):
    with pytest.raises(ConfigError, match=message):
        env_of(store, [{"name": "A", "valueFrom": source}])


def test_all_of_a_secret_that_is_no_text(store):
    with pytest.raises(ConfigError, match="key key in Secret ns/binary is not UTF-8"):
        env_of(store, [], envFrom=[{"secretRef": {"name": "binary"}}])


def with_volume(*paths):
    items = [{"key": "lr", "path": path} for path in paths]
    volume = {"name": "v", "configMap": {"name": "conf", "items": items}}
    return {**POD, "spec": {"volumes": [volume]}}


@pytest.mark.parametrize("paths", [["a", "a/b"], [".."], ["a/b", "a"], ["a\0"]])
def test_files_that_cannot_be_beside_each_other(store, tmp_path, paths):
    with pytest.raises(MountError, match=r'MountVolume.SetUp failed for volume "v" : '):
        make(store, with_volume(*paths), tmp_path)


def test_a_file_that_a_program_has_replaced_is_made_anew(store, tmp_path):
    """With nobody waiting, and no other file written in its place."""
    other = tmp_path / "other"
    other.touch()
    (folder,) = make(store, with_volume("a"), tmp_path).values()
    (folder / "a").unlink()
    (folder / "a").symlink_to(other)
    make(store, with_volume("a"), tmp_path)
    assert (folder / "a").read_text() == "0.1"
    assert (folder / "a").stat().st_mode & 0o777 == 0o600
    assert other.read_text() == ""
