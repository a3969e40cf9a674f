"""What the package shows."""

import importlib
from importlib.resources import files

import pytest

import diloco_eks
from diloco_protocol import BaseExecutor, ServerlessExecutor


def test_all_is_sorted_and_complete():
    assert diloco_eks.__all__ == sorted(diloco_eks.__all__)
    assert set(diloco_eks.__all__) == {"EKSExecutor", "EKSOptions", "K8sExecutor", "__version__"}
    assert diloco_eks.__version__ == importlib.import_module("diloco_eks.__about__").__version__


@pytest.mark.parametrize("name", ["EKSExecutor", "EKSOptions"])
def test_public_names_are_documented(name):
    assert (getattr(diloco_eks, name).__doc__ or "").strip()


def test_the_name_for_other_clusters_is_the_same_class():
    assert diloco_eks.K8sExecutor is diloco_eks.EKSExecutor


def test_it_is_an_executor(bench):
    executor = bench.executor()
    assert isinstance(executor, BaseExecutor)
    assert isinstance(executor, ServerlessExecutor)
    assert executor.supports_inter_replica_network is False
    assert executor.capabilities.cancel_scope == "gang"
    assert bench.executor(ttl_seconds_after_finished=60).capabilities.retention == 60
    assert executor.capabilities.failure_scope == "gang"
    assert bench.executor(on_replica_failure="continue").capabilities.failure_scope == "replica"


def test_what_is_shipped():
    assert (files("diloco_eks") / "py.typed").is_file()
    assert (files("diloco_eks") / "role.yaml").is_file()
