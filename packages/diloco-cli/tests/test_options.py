"""Options of backends as text."""

import pytest

from diloco_cli._backends import UnsetError, read_options, read_value
from diloco_protocol import FolderJournal, InvalidRequestError, Option, executors


def option(kind, default="none"):
    return Option("thing", kind, default, "")


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("text", "none", "none"),
        ("text", "[1]", "[1]"),
        ("path", "~/x", "~/x"),
        ("quantity", "16Gi", "16Gi"),
        ("quantity or `request`", "request", "request"),
        ("fail_run or continue", "continue", "continue"),
        ("whole number", "3", 3),
        ("number", "3.5", 3.5),
        ("number", "none", None),
        ("bool", "true", True),
        ("bool", "False", False),
        ("list of text", "a,b", ["a", "b"]),
        ("list of text", '["a,b"]', ["a,b"]),
        ("list of text", "", []),
        ("True, False or list of text", "true", True),
        ("True, False or list of text", "PATH,AWS_*", ["PATH", "AWS_*"]),
        ("mapping of text to text", '{"a": "b"}', {"a": "b"}),
        ("pod template", '{"spec": {}}', {"spec": {}}),
    ],
)
def test_a_value(kind, text, value):
    assert read_value(option(kind), text) == value


def test_a_journal_is_a_folder(tmp_path):
    journal = read_value(option("RunJournal"), str(tmp_path / "journal"))
    assert isinstance(journal, FolderJournal)
    assert journal.folder == tmp_path / "journal"
    with pytest.raises(InvalidRequestError, match="there is no such home folder"):
        read_value(option("RunJournal"), "~nobody-here/x")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("whole number", "3.5"),
        ("number", "many"),
        ("bool", "1"),
        ("list of text", "[1"),
        ("list of text", "[" * 100_000),
        ("mapping of text to text", "a=b"),
    ],
)
def test_what_is_no_value_is_refused(kind, text):
    with pytest.raises(InvalidRequestError, match=f"thing='.* is not allowed: it is a {kind}"):
        read_value(option(kind), text)


def test_a_secret_is_not_shown_in_a_refusal():
    with pytest.raises(InvalidRequestError) as error:
        read_value(Option("api_token", "number", "none", ""), "hunter2")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("kind", ["Backoff", "BatchV1Api", "client"])
def test_an_object_cannot_be_given(kind):
    with pytest.raises(InvalidRequestError, match=f"thing \\({kind}\\) cannot be given"):
        read_value(option(kind), "x")


def test_what_a_backend_does_not_know_is_refused():
    with pytest.raises(InvalidRequestError, match="eks has no option 'nmspace'; it has thing"):
        read_options("eks", [option("text")], {"nmspace": "x"})


def test_what_a_backend_needs_is_named():
    with pytest.raises(UnsetError, match=r"eks needs --option eks\.thing=…"):
        read_options("eks", [option("text", "(required)")], {})
    assert read_options("eks", [option("text", "(required)")], {"thing": "x"}) == {"thing": "x"}


OBJECTS = {"Backoff", "BatchV1Api", "CoreV1Api", "boto3.Session", "client", "modal.Client"}


@pytest.mark.parametrize("backend", sorted(executors()))
def test_every_option_of_an_installed_backend_can_be_given_or_is_an_object(backend):
    kinds = {each.type for each in executors()[backend].options()}
    assert kinds
    refused = set()
    for kind in kinds:
        try:
            read_value(option(kind), "\0")
        except InvalidRequestError as error:
            if "cannot be given on the command line" in str(error):
                refused.add(kind)
    assert refused <= OBJECTS
