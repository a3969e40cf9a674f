"""What an executor is made with."""

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from diloco_local import LocalOptions, LocalProcessExecutor
from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import options_of, options_table

FOR_TESTS = {"clock", "sleep"}


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"grace": -1}, "grace must be a number of seconds from 0 to 86400, not -1"),
        ({"grace": float("inf")}, "grace must be"),
        ({"grace": True}, "grace must be"),
        (
            {"inherit_env": "PATH"},
            "inherit_env must be a list of text, not a single one: write ['PATH']",
        ),
        ({"inherit_env": [1]}, "inherit_env[0] must be non-empty text, not 1"),
        ({"inherit_env": None}, "inherit_env must be a list of text, not None"),
        ({"python": None}, "python must be a path, not None"),
        ({"python": b"python3"}, "python must be a path, not b'python3'"),
        ({"cwd": ""}, "cwd must be a path, not ''"),
        ({"pythonpath": ["/src", 1]}, "pythonpath[1] must be a path, not 1"),
        ({"run_id": " "}, "run_id must be non-empty text, not ' '"),
        ({"run_id": "Bad Name!"}, "run_id='Bad Name!' cannot begin the names of runs"),
        ({"run_id": "x" * 25}, "1 to 24 lower-case letters"),
        ({"journal": 5}, "journal must be a RunJournal or None, not 5: a journal has the methods"),
        ({"backoff": 1.0}, "backoff must be a Backoff or None, not 1.0"),
        ({"pythonpath": "/src"}, "write ['/src']"),
        (
            {"root": "~nobody-here/x"},
            "root='~nobody-here/x': there is no such home folder. Write './~nobody-here/x'",
        ),
        (
            {"pythonpath": ["/src", "~nobody-here"]},
            "pythonpath[1]='~nobody-here': there is no such home folder",
        ),
        ({"gpus": "0"}, "write ['0']"),
        ({"gpus": ["0", "1", "0"]}, "gpus=['0', '1', '0'] names a GPU twice"),
        ({"env": {"REPLICA_RANK": "1"}}, "env may not set REPLICA_RANK"),
        ({"env": {"A": 1}}, "'A' maps to a value of type int"),
    ],
)
def test_values_that_are_refused(values, what):
    with pytest.raises(InvalidRequestError, match=re.escape(what)):
        LocalProcessExecutor(**values)


@pytest.mark.sampled
@pytest.mark.parametrize("value", [..., 5.5, b"bytes", {1: 2}, [None]], ids=str)
@pytest.mark.parametrize("name", [each.name for each in fields(LocalOptions)])
def test_whatever_is_given_is_refused_by_name_or_allowed(name, value):
    if (name, value) == ("grace", 5.5):
        return
    with pytest.raises(InvalidRequestError, match=rf"^{name}\b"):
        LocalProcessExecutor(**{name: value})


def test_what_can_be_read_only_once_is_kept():
    options = LocalOptions(
        inherit_env=iter(["PATH"]), pythonpath=(folder for folder in ["/a", "/b"]), gpus=iter("01")
    )
    assert (options.inherit_env, options.pythonpath, options.gpus) == (
        ("PATH",), ("/a", "/b"), ("0", "1"),
    )  # fmt: skip


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    executor = LocalProcessExecutor(
        root=Path("~/runs"), cwd="~/work",
        pythonpath=["~", "~/lib", "./~"], python="~/bin/python",
    )  # fmt: skip
    assert executor._root.path == tmp_path / "runs"
    (planned,) = executor.plan(1, "json:dumps").requests
    home = str(tmp_path)
    folders = planned["env"]["PYTHONPATH"].split(":")
    assert folders[:4] == [f"{home}/work", home, f"{home}/lib", f"{home}/~"]
    assert (planned["cwd"], planned["argv"][0]) == (f"{home}/work", f"{home}/bin/python")
    assert not (tmp_path / "~").exists()


def test_secrets_among_the_variables_are_not_in_the_representation():
    assert "hunter2" not in repr(LocalOptions(env={"TOKEN": "hunter2"}))


def test_the_constructor_takes_the_fields_by_name():
    parameters = inspect.signature(LocalProcessExecutor).parameters
    assert list(parameters) == [each.name for each in fields(LocalOptions)]
    for each in fields(LocalOptions):
        assert parameters[each.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[each.name].default is each.default
    with pytest.raises(TypeError, match="roof"):
        LocalProcessExecutor(roof="/")
    with pytest.raises(TypeError, match="positional"):
        LocalProcessExecutor("/")


def test_options_are_the_constructors():
    listed = LocalProcessExecutor().options()
    assert listed == options_of(LocalOptions)
    names = {each.name for each in listed}
    assert names == {each.name for each in fields(LocalOptions)} - FOR_TESTS
    assert [each.name for each in listed if len(each.help) < 15] == []


def test_the_readme_has_the_options():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- options -->\n")[2].partition("\n<!-- /options -->")[0]
    assert table == options_table(LocalOptions), (
        "print(options_table(LocalOptions)) is the new table"
    )


@pytest.mark.parametrize("cwd", ["x" * 300, "/no/such/folder", __file__])
def test_a_working_directory_that_is_none_is_refused(tmp_path, cwd):
    executor = LocalProcessExecutor(root=tmp_path, cwd=cwd)
    with pytest.raises(InvalidRequestError, match=r"the working directory cwd=.* is not a folder"):
        executor.plan(1, "json:dumps")
