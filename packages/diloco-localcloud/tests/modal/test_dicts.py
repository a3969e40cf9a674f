"""Dicts, by the real client and by the test that plays the container."""

from __future__ import annotations

import modal
import pytest
from grpclib.exceptions import GRPCError
from modal import exception
from modal_proto import api_pb2

DAY = 86400


def test_entries_are_created_once(lab):
    held = lab.dict()
    assert held.put("call-0", "fc-1", skip_if_exists=True)
    assert not held.put("call-0", "fc-2", skip_if_exists=True)
    assert held.get("call-0") == "fc-1"
    assert held.put("call-0", "fc-3")
    assert held["call-0"] == "fc-3"


def test_what_a_client_can_do_with_it(lab):
    held = lab.dict()
    held.update({"a": 1, ("b", 2): {"c": [3]}})
    assert dict(held.items()) == {"a": 1, ("b", 2): {"c": [3]}}
    assert (list(held.keys()), list(held.values())) == (["a", ("b", 2)], [1, {"c": [3]}])
    assert (held.len(), held.contains("a"), held.contains("z")) == (2, True, False)
    assert held.get("z", "default") == "default"
    assert held.pop("a") == 1
    with pytest.raises(KeyError):
        held["a"]
    assert held.len() == 1
    with lab.refused(exception.UnimplementedError, "does not serve DictClear"):
        held.clear()


def test_the_container_sees_the_same_entries(lab):
    held = lab.dict("diloco-run")
    held["launch"] = {"world_size": 4}
    inside = lab.world.dict("diloco-run")
    assert inside.get("launch") == {"world_size": 4}
    assert not inside.put("launch", 1, skip_if_exists=True)
    assert inside.put("life-0-1", "now", skip_if_exists=True)
    assert not held.put("life-0-1", "then", skip_if_exists=True)
    assert list(inside.items()) == ["launch", "life-0-1"]
    assert inside.pop("launch") == {"world_size": 4}
    assert inside.pop("launch") is None
    assert inside.get("launch", 5) == 5
    assert dict(held.items()) == {"life-0-1": "now"}


def test_made_found_listed_and_deleted(lab):
    with lab.refused(exception.NotFoundError, "Dict 'one' not found in environment 'main'"):
        lab.dict("one", create_if_missing=False).hydrate()
    with pytest.raises(LookupError, match="there is no Dict 'one'; there are: none"):
        lab.world.dict("one")
    for name in ("one", "two"):
        modal.Dict.objects.create(name, client=lab.client)
        lab.world.advance(1)
    with lab.refused(exception.AlreadyExistsError):
        modal.Dict.objects.create("one", client=lab.client)
    modal.Dict.objects.create("one", allow_existing=True, client=lab.client)
    assert [each.name for each in modal.Dict.objects.list(client=lab.client)] == ["two", "one"]
    (newest,) = modal.Dict.objects.list(client=lab.client, max_objects=1)
    assert newest.info().created_at.timestamp() == lab.world.now() - 1
    held = lab.dict("one", create_if_missing=False)
    held["a"] = 1
    modal.Dict.objects.delete("one", client=lab.client)
    with lab.refused(exception.NotFoundError):
        held.get("a")
    assert "a" not in lab.dict("one")


def test_more_than_a_page_of_them(lab):
    for number in range(101):
        modal.Dict.objects.create(f"run-{number}", client=lab.client)
        lab.world.advance(1)
    names = [each.name for each in modal.Dict.objects.list(client=lab.client)]
    assert names == [f"run-{number}" for number in range(100, -1, -1)]


def test_environments_keep_them_apart(lab):
    lab.world.add_environment("dev")
    lab.dict("one", environment_name="dev")["a"] = 1
    with lab.refused(exception.NotFoundError):
        lab.dict("one", create_if_missing=False).hydrate()
    assert lab.world.dict("one", environment="dev").get("a") == 1
    with lab.refused(exception.NotFoundError, "Environment 'prod' not found"):
        lab.dict("one", environment_name="prod").hydrate()
    with pytest.raises(ValueError, match="there is no environment 'prod'; there are: main, dev"):
        lab.world.dict("one", environment="prod")


@pytest.mark.parametrize(
    "use",
    [
        lambda held: held.get("a"),
        lambda held: held.put("a", 2),
        lambda held: held.contains("a"),
        lambda held: list(held.items()),
    ],
    ids=["get", "put", "contains", "contents"],
)
def test_entries_fade_seven_days_after_their_last_use(lab, use):
    held = lab.dict()
    held["a"] = held["b"] = 1
    lab.world.advance(6 * DAY)
    use(held)
    lab.world.advance(6 * DAY)
    assert held.contains("a")
    lab.world.advance(7 * DAY - 1)
    assert held.len() == 1
    lab.world.advance(1)
    assert held.len() == 0
    assert held.put("a", 3, skip_if_exists=True)


def test_several_entries_are_not_created_at_once(lab):
    held = lab.dict()
    held.hydrate()
    entries = [api_pb2.DictEntry(key=b"a"), api_pb2.DictEntry(key=b"b")]
    asked = api_pb2.DictUpdateRequest(dict_id=held.object_id, updates=entries, if_not_exists=True)
    with pytest.raises(GRPCError, match="if_not_exists is for one entry at a time"):
        lab.ask("DictUpdate", asked)
    assert held.len() == 0
