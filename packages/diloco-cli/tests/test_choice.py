"""What the command line says about backends."""

import pytest

from diloco_cli._backends import read_choice
from diloco_protocol import InvalidRequestError

INSTALLED = ["eks", "local_process"]


def read(backend=None, *given, variable=None):
    environ = {} if variable is None else {"DILOCO_OPTIONS": variable}
    return read_choice(backend, given, environ, INSTALLED)


def test_all_backends():
    choice = read()
    assert choice.names == ("eks", "local_process")
    assert choice.options == {}


def test_one_backend_and_its_options():
    choice = read("eks", "image=a/b:1", "eks.namespace=x", 'env={"A": "b=c"}')
    assert choice.names == ("eks",)
    assert choice.options == {"eks": {"image": "a/b:1", "namespace": "x", "env": '{"A": "b=c"}'}}


def test_the_variable_and_what_overrides_it():
    choice = read(None, "eks.image=new", variable="eks.image=old eks.owner=a local_process.grace=1")
    assert choice.options == {
        "eks": {"image": "new", "owner": "a"},
        "local_process": {"grace": "1"},
    }


@pytest.mark.parametrize(
    ("arguments", "variable", "told"),
    [
        (["sagemaker"], None, "--backend 'sagemaker' is not installed; installed are: eks, local"),
        ([None, "image=x"], None, "'image' is not of the form BACKEND.NAME=VALUE, such as eks."),
        (["eks", "image"], None, "'image' is not of the form BACKEND.NAME=VALUE"),
        (["eks", "=x"], None, "is not of the form BACKEND.NAME=VALUE"),
        ([None, "modal.app=x"], None, "modal is not installed here"),
        (["eks", "local_process.root=x"], None, "is for another backend than --backend eks"),
        ([], "image=x", "'image' is not of the form BACKEND.NAME=VALUE"),
        ([], "modal.app=x", "'modal.app': modal is not installed"),
    ],
)
def test_what_is_refused(arguments, variable, told):
    with pytest.raises(InvalidRequestError, match=told):
        read(*arguments, variable=variable)


def test_options_of_other_backends_in_the_variable_are_for_other_calls():
    assert read("eks", variable="local_process.root=x").names == ("eks",)


def test_the_command_to_come_back_with_has_no_secret():
    choice = read("eks", "image=a b", "eks.registry_password=hunter2")
    again = choice.again("wait", "run-1", "eks")
    assert again == (
        "diloco wait run-1 --backend eks --option 'image=a b' "
        "--option 'eks.registry_password=<redacted>'"
    )
