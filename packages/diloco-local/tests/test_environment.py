import os
import subprocess
import sys
import sysconfig

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_local._environment import compose, extra_folders, import_path, inherited
from diloco_local._processes import MARKER
from diloco_protocol import InvalidRequestError

LAUNCHER = {
    "PATH": "/bin",
    "AWS_REGION": "x",
    "AWS_PROFILE": "y",
    "REPLICA_RANK": "3",
    "REPLICA_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "5",
    "MASTER_ADDR": "host",
    "TORCHELASTIC_RUN_ID": "none",
    "RENDEZVOUS_URI": "s3://outer",
    "DILOCO_RUN_ID": "outer",
    "DILOCO_COHORT": "outer",
    "DILOCO_ATTEMPT": "2",
    MARKER: "outer/3",
}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (True, {"PATH", "AWS_REGION", "AWS_PROFILE"}),
        (False, set()),
        (["PATH"], {"PATH"}),
        (["AWS_*", "*_SIZE", "*_RANK", "REPLICA_RANK"], {"AWS_REGION", "AWS_PROFILE"}),
        (["MASTER_ADDR", "TORCHELASTIC_RUN_ID"], {"MASTER_ADDR", "TORCHELASTIC_RUN_ID"}),
    ],
)
def test_what_is_inherited(policy, expected):
    """A launcher that is a replica, or under torchrun, does not pass on its own rank unasked."""
    assert set(inherited(LAUNCHER, policy)) == expected


names = st.sampled_from(["A", "B", "C", "OMP_NUM_THREADS"])
environments = st.dictionaries(names, st.text(max_size=3))


@given(environments, environments, environments)
def test_the_later_wins_and_nothing_else_is_set(base, constructor, launch):
    """In particular no number of threads is set behind the caller's back."""
    assert compose(base, [constructor, launch], [], None) == {**base, **constructor, **launch}


def test_devices_and_path():
    result = compose(
        {"PYTHONPATH": "/base", "CUDA_VISIBLE_DEVICES": "0,1"},
        [{"PYTHONPATH": "/own"}],
        ["/a", "/b"],
        "1",
    )
    assert result == {
        "PYTHONPATH": os.pathsep.join(["/a", "/b", "/own"]),
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert compose({"CUDA_VISIBLE_DEVICES": "0,1"}, [], [], None) == {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize("own", ["", ":", "/own:", ":/own", "/own::/own"])
def test_an_empty_entry_of_the_path_is_none(own):
    """It would be the working directory, into which anybody may have put modules."""
    found = compose({}, [{"PYTHONPATH": own}], ["/a"], None)["PYTHONPATH"].split(":")
    assert found == ["/a", *filter(None, own.split(":"))]
    assert compose({"PYTHONPATH": ":"}, [], [], None) == {}


def test_a_relative_entry_of_the_inherited_path_is_none():
    """It is relative to the launcher's folder; the replica's may hold anyone's modules."""
    made = compose({"PYTHONPATH": ".:/base:src"}, [], ["/a"], None)
    assert made == {"PYTHONPATH": "/a:/base"}
    assert compose({"PYTHONPATH": "."}, [{"PYTHONPATH": "src"}], [], None) == {"PYTHONPATH": "src"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("-I", "A PYTHONHOME -P -s"),
        ("-E", "A PYTHONHOME -P"),
        ("-s", "PYTHONUSERBASE A PYTHONHOME -P -s"),
        ("-B", "PYTHONUSERBASE A PYTHONHOME -P"),
    ],
)
def test_replicas_ignore_what_the_launcher_s_interpreter_ignores(flag, expected):
    """But for a variable that is named."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); from diloco_local._environment import "
        "*; print(*inherited({'PYTHONUSERBASE': '', 'A': ''}, True), *inherited({'PYTHONHOME': "
        "''}, ['PYTHONHOME']), *SAFE_PATH)"
    )
    command = [sys.executable, flag, "-c", program, ":".join(filter(None, sys.path))]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == expected


@pytest.mark.processes
def test_a_value_that_the_locale_cannot_encode_is_named():
    program = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); from diloco_local import "
        "LocalProcessExecutor as Local; from diloco_protocol import InvalidRequestError\n"
        "try: Local(env={'V': '\\u20ac'}).launch_replicas(1, 'platform:node', timeout=60)\n"
        "except InvalidRequestError as error: print(error)"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, ":".join(filter(None, sys.path))],
        env={**os.environ, **locale},
        capture_output=True,
        text=True,
    )
    assert "V in env= has a character that the encoding of this machine's locale" in done.stdout


def test_a_folder_with_a_colon_in_its_name_is_refused(tmp_path, monkeypatch):
    """In PYTHONPATH it would be two folders, the second of them below the working directory."""
    odd = tmp_path / "a:b"
    odd.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(odd)])
    for call in (
        lambda: import_path([odd], "/any/python"),
        lambda: import_path(None, "/any/python", str(odd)),
        lambda: import_path(None, sys.executable),
    ):
        with pytest.raises(InvalidRequestError, match=r"a:b'.*pythonpath="):
            call()
    assert str(odd) not in import_path([tmp_path], sys.executable)


def test_the_folders_a_fresh_interpreter_lacks(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    path = [
        str(own),
        str(own),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        str(tmp_path / "missing"),
    ]
    assert extra_folders(path) == [str(own)]


def test_the_launcher_s_own_path_is_the_default(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_path(None, sys.executable)[0] == str(tmp_path)
    assert str(tmp_path) not in import_path(None, "/another/python")
    assert str(tmp_path) not in import_path([], sys.executable)
    monkeypatch.chdir(tmp_path)
    assert import_path(["sub"], sys.executable)[0] == str(tmp_path / "sub")


def test_the_working_directory_is_a_place_for_modules_only_if_somebody_said_so(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry.startswith(os.sep)])
    here = str(tmp_path)
    for python in (sys.executable, "/another/python"):
        assert here not in import_path(None, python)
        assert here not in import_path(["/else"], python)
        assert import_path(None, python, here)[0] == here
        assert import_path(["/else"], python, here)[:2] == [here, "/else"]
    # As it is in ``python -c``, ``python -m`` and at the prompt.
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for python in (sys.executable, "/another/python"):
        assert import_path(None, python)[0] == here
        assert import_path(None, python, here).count(here) == 1
        assert here not in import_path(["/else"], python)
