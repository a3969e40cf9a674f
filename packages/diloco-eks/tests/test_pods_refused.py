"""A Job whose pods are refused: check before it, describe after it, in the cluster's own words."""

import json
import logging

import pytest

from diloco_protocol import ForbiddenError, InvalidRequestError

QUOTA = {"metadata": {"name": "small"}, "spec": {"hard": {"requests.cpu": "10m"}}}
LIMITS = {
    "metadata": {"name": "limits"},
    "spec": {"limits": [{"type": "Container", "max": {"cpu": "1"}}]},
}
RESTRICTED = (
    'PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container "replica" must '
    "set securityContext.allowPrivilegeEscalation=false), unrestricted capabilities (container "
    '"replica" must set securityContext.capabilities.drop=["ALL"]), runAsNonRoot != true (pod or '
    'container "replica" must set securityContext.runAsNonRoot=true), seccompProfile (pod or '
    'container "replica" must set securityContext.seccompProfile.type to "RuntimeDefault" or '
    '"Localhost")'
)
OBSTACLES = {
    "quota": (
        lambda bench: bench.create("/api/v1/namespaces/default/resourcequotas", QUOTA),
        {},
        (
            "exceeded quota: small, requested: requests.cpu=4, used: requests.cpu=0, limited: "
            "requests.cpu=10m"
        ),
    ),
    "limits": (
        lambda bench: bench.create("/api/v1/namespaces/default/limitranges", LIMITS),
        {},
        "maximum cpu usage per Container is 1, but limit is 4",
    ),
    "policy": (
        lambda bench: bench.label_namespace(enforce="restricted"),
        {},
        f"violates {RESTRICTED}",
    ),
    "runtime class": (
        lambda bench: None,
        {"runtime_class_name": "gvisor"},
        'pod rejected: RuntimeClass "gvisor" not found',
    ),
    "priority class": (
        lambda bench: None,
        {"pod_overlay": {"spec": {"priorityClassName": "high"}}},
        "no PriorityClass with name high was found",
    ),
}


@pytest.fixture(params=OBSTACLES)
def refused(bench, request):
    """An executor whose pods the cluster refuses, and the cluster's words."""
    prepare, options, words = OBSTACLES[request.param]
    prepare(bench)
    return bench.executor(**options), words


@pytest.mark.sampled
def test_check_says_so_before(refused):
    executor, words = refused
    bad = {finding.subject: finding.message for finding in executor.check(2) if finding.ok is False}
    assert words in bad["pods"]
    assert "manifest" not in bad  # the Job itself is fine


@pytest.mark.sampled
def test_describe_says_so_afterwards(bench, refused):
    executor, words = refused
    run = bench.launch(2, start=False, executor=executor)
    assert run.describe(0).message == "there is no pod for it yet"
    bench.world.advance(31)
    for rank in (0, 1):
        status = run.describe(rank)
        assert (status.state, status.reason) == ("pending", "starting")
        assert status.message.startswith(
            "there is no pod for it yet; the cluster says FailedCreate ("
        )
        assert words in status.message
    assert "(4 times)" in run.describe(1).message


def test_collect_says_so_to_its_caller_and_asks_rarely(bench):
    bench.create("/api/v1/namespaces/default/resourcequotas", QUOTA)
    run = bench.launch(50, start=False)
    bench.stand_in.calls.clear()
    told = []
    run.executor.collect(
        run.handles,
        timeout=100,
        progress=lambda known: told.append({status.message for status in known.values()}),
    )
    (last,) = told[-1]
    assert "exceeded quota: small" in last
    assert bench.stand_in.calls.count("list", "events") <= 100 / 15 + 1


def test_a_pod_that_is_stuck_says_why(bench):
    run = bench.launch(2, start=False)
    pod = run.pod(0)
    pod.warn("FailedMount", 'MountVolume.SetUp failed for volume "data": not found')
    pod.warn("FailedMount", 'MountVolume.SetUp failed for volume "data": not found')
    assert "FailedMount" not in run.describe(0).message
    bench.world.advance(16)
    assert run.describe(0).message == (
        "ContainerCreating; the cluster says FailedMount (2 times): "
        'MountVolume.SetUp failed for volume "data": not found'
    )
    assert run.describe(1).message == "ContainerCreating"
    assert run.executor.poll(run.handles[0]) == "pending"


def test_what_the_message_says_already_is_not_said_again(bench):
    bench.world.schedulable = False
    run = bench.launch(1, start=False)
    bench.world.advance(20)
    assert run.describe(0).message == bench.world.why_not


def test_without_the_right_to_list_events(bench, caplog):
    bench.create("/api/v1/namespaces/default/resourcequotas", QUOTA)
    bench.stand_in.access.deny("list", "events")
    run = bench.launch(1, start=False)
    bench.world.advance(60)
    for _ in range(5):
        message = run.describe(0).message
        bench.world.advance(20)
    assert message == "there is no pod for it yet"
    assert caplog.records == []


def test_events_that_cannot_be_read_change_nothing(bench):
    bench.create("/api/v1/namespaces/default/resourcequotas", QUOTA)
    run = bench.launch(1, start=False)
    bench.world.advance(60)
    bench.stand_in.faults.add("unavailable", resource="events", times=None)
    assert run.describe(0).message == "there is no pod for it yet"


def test_pods_that_may_not_be_tried(bench):
    bench.stand_in.access.deny("create", "pods")
    (finding,) = [each for each in bench.executor().check(1) if each.subject == "pods"]
    assert finding.ok is None
    assert "not even as a dry run" in finding.message


def test_warnings_are_passed_on(bench, caplog):
    bench.label_namespace(warn="restricted")
    executor = bench.executor()
    (finding,) = [each for each in executor.check(1) if each.ok is None]
    assert finding.message.startswith(f"the cluster warns: would violate {RESTRICTED}. ")
    assert "restricted=True" in finding.message
    with caplog.at_level(logging.WARNING, "diloco_eks"):
        bench.launch(1, executor=executor)
    assert [record.getMessage().partition("would")[2] for record in caplog.records] == [
        f" violate {RESTRICTED}"
    ]


def test_check_says_what_makes_pods_comply_or_breaks_that(bench):
    bench.label_namespace(enforce="restricted")
    context = {"name": "replica", "securityContext": {"allowPrivilegeEscalation": True}}
    breaks = {"pod_overlay": {"spec": {"containers": [context]}}}
    for options, words in (
        ({}, "Give restricted=True"),
        (breaks, "Give restricted=True"),
        ({"restricted": True, **breaks}, "pod_overlay= breaks that standard"),
    ):
        findings = [each for each in bench.executor(**options).check(1) if each.ok is not True]
        assert [each.subject for each in findings] == ["manifest", "pods"]
        assert all(words in each.message for each in findings)
        assert all(("Give" in each.message) == ("Give" in words) for each in findings)
    assert all(each.ok for each in bench.executor(restricted=True).check(1))


def test_the_plain_manifest_complies_with_baseline(bench):
    bench.label_namespace(enforce="baseline")
    run = bench.launch(1)
    assert run.states() == ["running"]


HINT = "has the Role that is needed"


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (
            (
                'jobs.batch is forbidden: User "u" cannot create resource "jobs" in API group '
                '"batch" in the namespace "a"'
            ),
            HINT,
        ),
        *(
            (text, text)
            for text in (
                'admission webhook "validate.kyverno.svc" denied the request: no owner',
                "jobs.batch \"run\" is forbidden: ValidatingAdmissionPolicy 'p' denied request: no",
                "unable to create new content in namespace a because it is being terminated",
            )
        ),
    ],
)
def test_hints_fit(message, hint):
    from diloco_eks._client._errors import to_error

    body = {"kind": "Status", "reason": "Forbidden", "message": message}
    error = to_error("create Job a/run", 403, json.dumps(body).encode(), {})
    assert isinstance(error, ForbiddenError)
    assert hint in str(error)
    assert (HINT in str(error)) == (hint == HINT)


def test_a_namespace_that_is_not_there(bench):
    with pytest.raises(InvalidRequestError, match=r"no namespace 'none'.*give another namespace="):
        bench.launch(1, executor=bench.executor(namespace="none"))
