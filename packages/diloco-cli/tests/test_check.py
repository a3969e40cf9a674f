"""``check`` on backends in memory."""

import json

import pytest
from cli_lab import RUNNING, Broken, World, command

from diloco_cli import _installed
from diloco_cli._installed import check
from diloco_protocol import AuthError, Finding, UnavailableError
from diloco_protocol.backend import Answer

REACHED = "it can be reached; runs that it has records of: {}"


class Quota(World):
    def _findings(self, request):
        return [Finding("quota", False, f"\x1bquota for {len(request.ranks)}")]


@pytest.fixture
def probe(monkeypatch):
    """The probe of diloco-core, as it answers; None: not installed."""
    monkeypatch.setattr(_installed, "get_command", lambda name: probed.get(name))
    probed = {}
    return lambda answer: probed.update(probe=answer)


def test_every_backend_is_asked():
    made = command(World("a", {"one": [RUNNING]}), Broken("b", AuthError("no credentials\x1b")))
    assert check(made.session, None) == 1
    versions, *others = made.out().splitlines()
    assert "diloco-protocol 0.1.0" in versions
    assert others == [
        f"ok a: {REACHED.format(1)}",
        "no b: no credentials\\x1b",
    ]


def test_what_removed_packages_have_left_is_no_matter(tmp_path, monkeypatch):
    for folder, text in (("left", ""), ("noname", "Metadata-Version: 2.1\n"), ("other", None)):
        (tmp_path / f"{folder}-1.dist-info").mkdir()
        if text is not None:
            (tmp_path / f"{folder}-1.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    made = command(World("a", {}))
    assert check(made.session, None) == 0
    assert "diloco-protocol 0.1.0" in made.out()


def test_a_launch_is_looked_at_by_the_backend_that_is_named():
    world = Quota("a", {})
    made = command(world, backend="a", as_json=True)
    assert check(made.session, None) == 1
    printed = json.loads(made.out())
    assert (printed["version"], printed["ok"]) == (1, False)
    assert printed["findings"][1:] == [
        {
            "subject": "a",
            "ok": True,
            "message": REACHED.format(0),
        },
        {"subject": "a quota", "ok": False, "message": "\\x1bquota for 1"},
    ]
    assert printed["store"] is None
    assert check(command(world).session, None) == 0, "it was not asked about a launch"


def test_a_backend_that_is_named_and_cannot_be_reached():
    made = command(Broken("b", AuthError("no credentials")), backend="b")
    assert check(made.session, None) == 1
    assert made.out().splitlines()[1:] == ["no b: no credentials"]


def test_a_store_is_tried(probe):
    probe(lambda uri: Answer({"read_ms": 1.5}, (f"{uri} can be used", "and is quick")))
    made = command(World("a", {}))
    assert check(made.session, "s3://bucket/x") == 0
    assert made.out().splitlines()[-1] == "ok store: s3://bucket/x can be used. and is quick"
    made = command(World("a", {}), as_json=True)
    assert check(made.session, "s3://bucket/x") == 0
    assert json.loads(made.out())["store"] == {"read_ms": 1.5}


def test_a_store_that_cannot_be_used(probe):
    def fails(uri):
        raise UnavailableError(f"{uri} cannot be written")

    probe(fails)
    made = command(World("a", {}))
    assert check(made.session, "s3://key:hunter2@bucket") == 1
    assert made.out().splitlines()[-1] == "no store: s3://<redacted>@bucket cannot be written"


def test_a_store_without_core(probe):
    made = command(World("a", {}))
    assert check(made.session, "s3://bucket") == 1
    assert "no store: `probe` needs diloco-core" in made.out()
    assert "pip install diloco-core" in made.out()
