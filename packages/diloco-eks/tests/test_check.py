"""What stands in the way of a launch."""

import pytest

from diloco_eks._verbs._check import needs


def found(findings):
    return {finding.subject: finding.ok for finding in findings} | {
        "bad": [finding.message for finding in findings if finding.ok is False]
    }


def test_all_is_well(bench):
    findings = bench.executor(service_account_name="default").check(2, gpu="L4:4")
    assert found(findings) == {
        "cluster": True, "rights": True, "service account": True, "manifest": True, "pods": True,
        "quota": True, "bad": [],
    }  # fmt: skip
    assert bench.executor().list_runs() == []


def test_no_cluster_is_one_finding(bench, tmp_path):
    (finding,) = bench.executor(kubeconfig=tmp_path / "none").check()
    assert (finding.subject, finding.ok) == ("cluster", False)
    assert "update-kubeconfig" in finding.message
    bench.stand_in.stop()
    (finding,) = bench.executor().check()
    assert (finding.subject, finding.ok) == ("cluster", False)


def test_rights_that_are_missing(bench):
    bench.stand_in.access.deny("patch", "jobs")
    bench.stand_in.access.deny("get", "pods/log")
    bench.stand_in.access.deny("list", "resourcequotas")
    bench.stand_in.access.deny("get", "serviceaccounts")
    findings = bench.executor(service_account_name="default").check()
    assert [message.split(" in ")[0] for message in found(findings)["bad"]] == [
        "patch of jobs",
        "get of pods/log",
    ]
    assert "role.yaml" in found(findings)["bad"][0]
    assert (found(findings)["quota"], found(findings)["service account"]) == (None, None)


def test_rights_that_can_be_spared(bench):
    spared = [("get", "serviceaccounts"), ("list", "events")]
    for verb, resource in spared:
        bench.stand_in.access.deny(verb, resource)
    findings = [each for each in bench.executor().check() if each.subject == "rights"]
    assert all(each.ok is not False for each in findings)
    unknown = [each.message for each in findings if each.ok is None]
    for (verb, resource), message in zip(spared, unknown, strict=True):
        assert message.startswith(f"{verb} of {resource} in default is not allowed, so ")
        assert "role.yaml" in message


def test_what_a_cluster_lacks(bench):
    findings = bench.executor(service_account_name="trainer").check()
    assert "no service account 'trainer'" in found(findings)["bad"][0]
    overlay = {"spec": {"containers": [{"name": "replica", "resources": {"limits": {"cpu": "1"}}}]}}
    findings = bench.executor(pod_overlay=overlay).check()
    assert "cpu limit" in found(findings)["bad"][0]


def test_a_quota_that_is_too_small(bench):
    from kubernetes import client, config

    api = config.new_client_from_config(str(bench.kubeconfig))
    hard = {"requests.nvidia.com/gpu": "16", "requests.memory": "1Ti"}
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team"},
        "spec": {"hard": hard},
    }
    client.CoreV1Api(api).create_namespaced_resource_quota(namespace="default", body=body)
    assert found(bench.executor().check(2, gpu="H100:8"))["bad"] == []
    (message,) = found(bench.executor().check(3, gpu="H100:8"))["bad"]
    assert message.startswith(
        "the run needs 24 of requests.nvidia.com/gpu, and the quota team has 16 of 16 left"
    )
    (message,) = found(bench.executor().check(2, memory="600Gi"))["bad"]
    assert "1.17188Ti of requests.memory" in message
    api.rest_client.pool_manager.clear()


@pytest.mark.parametrize(
    "scope",
    [
        {"scopes": ["BestEffort"]},
        {"scopeSelector": {"matchExpressions": [{"scopeName": "PriorityClass"}]}},
    ],
)
def test_a_quota_with_scopes_may_not_count_the_run(bench, scope):
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "spare"},
        "spec": {"hard": {"pods": "0"}, **scope},
    }
    bench.create("/api/v1/namespaces/default/resourcequotas", body)
    (quota,) = (each for each in bench.executor().check() if each.subject == "quota")
    assert quota.ok is None
    assert "1 quotas of default have scopes" in quota.message


def test_a_pod_that_does_not_come_is_not_known_and_removed(bench):
    findings = bench.executor().check(rendezvous_uri="s3://key:hidden@bucket/run", patience=30.0)
    assert (findings[-1].subject, findings[-1].ok) == ("rendezvous", None)
    assert "s3://<redacted>@bucket/run was still pending after 30 s" in findings[-1].message
    assert bench.executor().list_runs() == []


def test_an_image_that_cannot_be_pulled_is_named_by_the_pod_that_tries(bench):
    bench.stand_in.images.refuse("registry.example/trainer:1")
    findings = bench.executor().check(rendezvous_uri="s3://bucket/run", patience=30.0)
    assert (findings[-1].subject, findings[-1].ok) == ("rendezvous", None)
    assert 'failed to pull and unpack image "registry.example/trainer:1"' in findings[-1].message


def test_a_pod_that_could_not_be_removed_is_named(bench):
    for verb in ("patch", "delete"):
        bench.stand_in.faults.add("forbidden", verb=verb, resource="jobs", times=99)
    findings = bench.executor().check(rendezvous_uri="s3://bucket/run", patience=30.0)
    assert [finding.subject for finding in findings][-2:] == ["rendezvous", "cleanup"]
    (run,) = bench.executor().list_runs()
    assert findings[-1].ok is False
    assert f"may cost money: end it with cancel_run({run!r})" in findings[-1].message


def test_needs(bench):
    (job,) = bench.executor(efa=2).plan(3, "a:b", gpu="L4", cpu="500m", memory="1Gi").requests
    total = needs(job)
    assert (total["cpu"], total["requests.memory"], total["pods"]) == (1.5, 3 * 1024**3, 3)
    assert (total["requests.nvidia.com/gpu"], total["limits.vpc.amazonaws.com/efa"]) == (3, 6)
