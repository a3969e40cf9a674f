"""Whatever foreign records and keys say: an answer or a named error, soon, in 200 MiB."""

import json
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import foreign_lab
import pytest
from foreign_lab import MEMBERSHIPS, MEMORY, VALUES, Foreign, leaves, replaced, seal, train

from diloco_core import CoreError, CorruptedObjectError, RendezvousError, export
from diloco_core._run._records._manifest import Manifest
from diloco_core._store import _reread


def met(folder, membership, act, count, seed, wanted=""):
    """Return what ends badly of a sample of cases."""
    command = [sys.executable, foreign_lab.__file__, folder, membership, act, str(count), str(seed)]
    done = subprocess.run([*command, wanted], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["of"] >= min(count, 1)
    return told["bad"]


def test_a_few_fields_and_keys(tmp_path, request, monkeypatch):
    """In this process, so without the limits."""
    monkeypatch.setattr(_reread, "REREADS", (0.0, 0.0, 0.0))
    foreign = Foreign(tmp_path / "run", "sharded")
    cases = [case for case in foreign.cases() if not isinstance(case[2], int)]
    few = random.Random(request.config.option.seed or 0).sample(cases, 8)
    assert foreign.met(few, "export", here=True) == {}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("act", ["export", "resume"])
@pytest.mark.parametrize("membership", MEMBERSHIPS)
def test_any_field_and_any_key(tmp_path, request, membership, act):
    assert met(tmp_path, membership, act, 1000, request.config.option.seed or 0) == {}


@pytest.mark.slow
@pytest.mark.processes
def test_a_state_that_names_no_shards(tmp_path):
    """An incarnation that resumes reads its record in more places than where it is loaded."""
    assert met(tmp_path, "sharded", "resume", 99, 0, "('sums',) []") == {}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("act", ["export", "resume"])
@pytest.mark.parametrize("membership", MEMBERSHIPS)
def test_files_of_three_gibibytes(tmp_path, membership, act):
    assert met(tmp_path, membership, act, 99, 0, " sparse") == {}


@pytest.mark.parametrize("membership", ["fixed", "sharded"])
def test_an_inner_state_of_three_gibibytes_is_not_read(tmp_path, membership, caplog):
    """What has such a size is not read before something bears it out."""
    train(tmp_path / "run", membership, 2)
    for file in (tmp_path / "run" / "inner").rglob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.truncate(3 * 2**30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert train(tmp_path / "run", membership, 4, resume=True) >= 4
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY
    assert "saved inner state is damaged" in caplog.text


@pytest.mark.parametrize("membership", ["fixed", "sharded"])
def test_tables_of_manifests(tmp_path, membership, request):
    """Every field holds what it must, or the error names it."""
    train(tmp_path / "run", membership, 1)
    record = json.loads((tmp_path / "run" / "manifest.json").read_bytes())
    for name in ("kind", "format", "xxh3_128"):
        del record[name]
    whole = Manifest.from_json(seal("manifest", "manifest.json", record), "manifest")
    assert whole.fragments == record["fragments"]
    tables = [path for path in leaves(record) if path[0] in {"fragments", "unsynced", "settings"}]
    cases = [(path, value) for path in tables for value in (..., *VALUES)]
    said = []
    for path, value in random.Random(request.config.option.seed or 0).sample(cases, 400):
        try:
            changed = seal("manifest", "manifest.json", replaced(record, path, value))
            Manifest.from_json(changed, "manifest")
        except CoreError as error:
            said.append(str(error))
    assert len(said) > 200
    assert all("manifest" in text for text in said)


@pytest.mark.sampled
@pytest.mark.parametrize("membership", ["fixed", "sharded", "gather"])
@pytest.mark.parametrize("content", [b"", b"stray"])
def test_a_huge_number_in_a_name_costs_nothing(tmp_path, membership, content):
    last = train(tmp_path / "run", membership, 2)
    for key in sorted((tmp_path / "run").glob("*/0000000*")):
        name = "9" * 8 + key.name[8:]
        stray = key.with_name(name)
        if key.is_dir():
            stray.mkdir(exist_ok=True)
            for inside in key.iterdir():
                (stray / inside.name).write_bytes(content)
        else:
            stray.write_bytes(content)
    file = tmp_path / "model.safetensors"
    assert export(tmp_path / "run", file) == last
    with pytest.raises((RendezvousError, CorruptedObjectError)):
        export(tmp_path / "run", file, at=77)
    assert Path(file).stat().st_size > 0


@pytest.mark.parametrize("folder", ["commits", "state"])
def test_a_huge_number_is_not_gone_back_from(tmp_path, folder):
    """What resume="newest-whole" gives up is listed, so it has an end."""
    train(tmp_path / "run", "sharded", 2)
    newest = max((tmp_path / "run" / folder).iterdir())
    stray = newest.with_name("9" * 8 + newest.name[8:])
    copy = shutil.copytree if newest.is_dir() else shutil.copy
    copy(newest, stray)
    try:
        assert train(tmp_path / "run", "sharded", 4, resume="newest-whole") >= 4
    except CorruptedObjectError as error:
        assert "99999999" in str(error)  # noqa: PT017
        assert "Remove what the run has not written" in str(error)  # noqa: PT017
