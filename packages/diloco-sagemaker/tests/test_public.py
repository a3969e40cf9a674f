"""What the package shows."""

import json
import subprocess
import sys
from importlib.resources import files

import pytest

import diloco_sagemaker
from diloco_protocol import MissingDependencyError, ServerlessExecutor
from diloco_sagemaker._request import _model


def test_all_is_sorted_and_complete():
    assert diloco_sagemaker.__all__ == sorted(diloco_sagemaker.__all__)
    assert set(diloco_sagemaker.__all__) == {"SageMakerExecutor", "SageMakerOptions", "__version__"}


@pytest.mark.parametrize("name", ["SageMakerExecutor", "SageMakerOptions"])
def test_public_names_are_documented(name):
    assert (getattr(diloco_sagemaker, name).__doc__ or "").strip()


def test_it_is_an_executor(offline):
    executor = offline()
    assert isinstance(executor, ServerlessExecutor)
    assert executor.backend_name == "sagemaker"
    assert executor.capabilities.cancel_scope == "replica"
    assert {option.name for option in executor.options()} >= {"role_arn", "spot", "quota_timeout"}


@pytest.mark.parametrize("name", ["launcher_policy.json", "role_policy.json"])
def test_the_policies_are_shipped(name):
    policy = json.loads((files("diloco_sagemaker") / name).read_text(encoding="utf-8"))
    assert policy["Version"] == "2012-10-17"
    actions = [
        action
        for statement in policy["Statement"]
        for action in (
            [statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"]
        )
    ]
    assert not [action for action in actions if "*" in action]


def test_the_client_library_is_not_imported_before_it_is_needed():
    code = (
        "import sys, diloco_sagemaker; print([m for m in sys.modules if m in ('boto3', "
        "'botocore')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_client_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "botocore.loaders", None)
    _model._validator_and_shape.cache_clear()
    with pytest.raises(MissingDependencyError, match="pip install boto3"):
        _model.check_request({})
