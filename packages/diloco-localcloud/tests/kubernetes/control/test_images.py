"""Images that cannot be pulled, on demand."""

from __future__ import annotations


def waiting(clients):
    (pod,) = clients.pods()
    return pod["status"]["containerStatuses"][0]["state"].get("waiting", {})


def events(clients):
    listed = clients.core.list_namespaced_event(
        namespace="ns", field_selector="involvedObject.kind=Pod"
    )
    return {(event.type, event.reason, event.message): event.count for event in listed.items}


def test_a_pull_fails_and_is_tried_again_until_it_succeeds(clients):
    clients.stand_in.images.refuse("any:1")
    clients.create(clients.indexed("run", 1))
    clients.world.advance(0.5)
    why = (
        'rpc error: code = NotFound desc = failed to pull and unpack image "any:1": '
        'failed to resolve reference "any:1": any:1: not found'
    )
    assert waiting(clients) == {"reason": "ErrImagePull", "message": why}
    clients.world.advance(1)
    back_off = {
        "reason": "ImagePullBackOff",
        "message": f'Back-off pulling image "any:1": ErrImagePull: {why}',
    }
    assert waiting(clients) == back_off
    clients.world.advance(9)
    assert waiting(clients)["reason"] == "ErrImagePull"
    clients.world.advance(15)
    assert waiting(clients) == back_off
    assert events(clients) == {
        ("Normal", "Scheduled", events_of_scheduler(clients)): 1,
        ("Warning", "Failed", f'Failed to pull image "any:1": {why}'): 2,
        ("Warning", "Failed", "Error: ErrImagePull"): 2,
        ("Normal", "BackOff", 'Back-off pulling image "any:1"'): 2,
        ("Warning", "Failed", "Error: ImagePullBackOff"): 2,
    }
    clients.stand_in.images.allow("any:1")
    clients.world.advance(20)
    assert waiting(clients)["reason"] == "ContainerCreating"
    clients.world.pod("run", 0, "ns").start()
    clients.world.advance(600)
    assert clients.pods()[0]["status"]["phase"] == "Running"


def events_of_scheduler(clients):
    (pod,) = clients.pods()
    return f"Successfully assigned ns/{pod['metadata']['name']} to stand-in-0"


def test_the_words_may_be_the_tests_own(clients):
    clients.stand_in.images.refuse("any:1", "pulling {0}: 401 Unauthorized")
    clients.create(clients.indexed("run", 1))
    clients.world.advance(0.5)
    assert waiting(clients)["message"] == "pulling any:1: 401 Unauthorized"


def test_a_pod_that_is_told_to_go_is_tried_no_more(clients):
    clients.stand_in.images.refuse("any:1")
    clients.create(clients.indexed("run", 1, grace=2))
    clients.world.advance(0.5)
    clients.delete("run", propagation_policy="Foreground")
    clients.world.settle(within=30)
    assert clients.pods() == []
    assert ("Normal", "BackOff", 'Back-off pulling image "any:1"') not in events(clients)
