"""The manifests of a strict run that has been resumed: lost ones, damaged ones, and those of another run."""

import logging

import keys_lab
import pytest
from damage_lab import flip
from keys_lab import MANIFEST, copy_key
from strict_lab import Run, in_folder, refused
from training_lab import identical

from diloco_core import CorruptedObjectError, RunExistsError, export
from diloco_core.testing import SimulatedStore

SECOND = keys_lab.manifest_key(2)
SECOND_COPY = copy_key(SECOND)


@pytest.fixture
def twice(stopped):
    """The same run, resumed and stopped again after five outer steps."""
    stopped.live(resume=True, until=5)
    return stopped


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("diloco_core._store._reread.REREADS", (0.0, 0.0))


def damage(run, key):
    run.store.objects[key] = flip(run.store.objects[key], 4 * len(run.store.objects[key]))


def stored(run, key=SECOND):
    """The fields of a manifest in the store."""
    return keys_lab.fields(key, run.store.objects[key])


def names(run, name):
    """The kinds of objects whose keys have this name of the run."""
    return {found.kind for found in map(keys_lab.kept, run.store.objects) if found.run == name}


class TestOfAnotherRun:
    def test_a_new_run_does_not_begin_beside_them(self, twice):
        """Somebody empties the prefix in the order of the keys, and stops after the first manifest."""
        for key in sorted(twice.store.objects):
            if key <= MANIFEST:
                twice.store.remove(key)
        left = sorted(twice.store.objects)
        for result in twice.live():
            assert isinstance(result, RunExistsError)
            assert f"holds '{SECOND}' of an earlier run" in str(result)
        written = set(twice.store.objects).difference(left)
        assert not {keys_lab.kept(key).kind for key in written} & {"claim", "state"}

    def test_one_that_appears_later_is_not_believed(self, twice, tmp_path):
        other = Run(2)
        other.live(until=3)
        before = other.live(resume=True, until=3)
        assert identical(before)
        for key in (SECOND, SECOND_COPY):
            other.store.objects[key] = twice.store.objects[key]
        match = rf"{SECOND} belongs to another run than .*{MANIFEST}: .* move {SECOND} and {SECOND_COPY} away"
        refused(other, CorruptedObjectError, match)
        with pytest.raises(CorruptedObjectError, match=match):
            export(in_folder(other, tmp_path / "run"), tmp_path / "model")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("earlier", lambda fields: []),
            ("given_up", lambda fields: ["f"]),
            ("given_up", lambda fields: [fields["earlier"][0]["run"][:16]]),
        ],
        ids=["no first life", "no name", "a name that counts"],
    )
    def test_one_that_contradicts_itself_is_damaged(self, twice, field, value):
        changed = keys_lab.sealed_again(
            SECOND, twice.store.objects[SECOND], **{field: value(stored(twice))}
        )
        twice.store.objects[SECOND] = changed
        twice.store.remove(SECOND_COPY)
        refused(twice, CorruptedObjectError, SECOND)


def test_a_copy_of_another_run_does_no_harm_where_a_later_manifest_is_there(twice, tmp_path):
    """Of the first manifest, which is not needed any more."""
    other = Run(2)
    other.live(until=1)
    twice.store.objects[copy_key(MANIFEST)] = other.store.objects[MANIFEST]
    twice.store.remove(MANIFEST)
    assert export(in_folder(twice, tmp_path / "run"), tmp_path / "model") == 5
    assert identical(twice.live(resume=True))


@pytest.mark.parametrize("harm", ["gone", "damaged"])
@pytest.mark.parametrize("lives", [1, 2])
@pytest.mark.parametrize("of", ["manifest", "copy"])
def test_one_of_the_two_is_enough(stopped, tmp_path, caplog, harm, lives, of):
    if lives == 2:
        stopped.live(resume=True, until=5)
    key = {1: MANIFEST, 2: SECOND}[lives]
    assert stopped.store.objects[copy_key(key)] == stopped.store.objects[key]
    lost = key if of == "manifest" else copy_key(key)
    if harm == "gone":
        stopped.store.remove(lost)
    else:
        damage(stopped, lost)
    steps = {1: 3, 2: 5}[lives]
    with caplog.at_level(logging.WARNING):
        assert export(in_folder(stopped, tmp_path / "run"), tmp_path / "model") == steps
        seen = {}
        assert identical(stopped.live(resume=True, seen=seen))
    assert seen == dict.fromkeys(range(2), (steps, 2 * steps, 0))
    text = f"Its copy {copy_key(key)} is whole and is used instead"
    assert (text in caplog.text) == (of == "manifest")


def test_what_is_left_of_an_earlier_run_may_be_a_copy(stopped):
    """The objects of a prefix are deleted in the order of their keys, and this stops before the last one of a folder."""
    other = Run(2)
    other.store.write(SECOND_COPY, b"of an earlier run")
    for result in other.live():
        assert isinstance(result, RunExistsError)
        assert f"holds '{SECOND_COPY}' of an earlier run" in str(result)


@pytest.mark.parametrize("harm", ["gone", "damaged"])
class TestWhenItIsLost:
    """Both the manifest and its copy."""

    def harm(self, run, key, harm):
        for lost in (key, copy_key(key)):
            if harm == "gone":
                run.store.remove(lost)
            else:
                damage(run, lost)

    def test_the_first_one_is_not_needed_any_more(self, twice, tmp_path, caplog, harm):
        self.harm(twice, MANIFEST, harm)
        with caplog.at_level(logging.WARNING):
            assert export(in_folder(twice, tmp_path / "run"), tmp_path / "model") == 5
        assert f"{SECOND} is read instead" in caplog.text
        seen = {}
        assert identical(twice.live(resume=True, seen=seen))
        assert seen == dict.fromkeys(range(2), (5, 10, 0))
        assert f"does not need this one any more, since {SECOND} says the same" in caplog.text

    def test_the_only_one(self, stopped, harm):
        self.harm(stopped, MANIFEST, harm)
        for resume in (True, "newest-whole"):
            before = dict(stopped.store.objects)
            for result in stopped.live(resume=resume):
                with pytest.raises(CorruptedObjectError, match=rf"{MANIFEST}.* put it back"):
                    raise result
            assert stopped.store.objects == before

    def test_the_error_says_that_it_is_the_manifest_that_is_missing(self, stopped, harm):
        """The states of the life before are gone, as they should be."""
        stopped.live(resume=True, until=8)
        copy = stopped.store.objects[SECOND]
        self.harm(stopped, SECOND, harm)
        assert copy_key(SECOND) == SECOND_COPY
        result, _ = stopped.live(resume="newest-whole")
        with pytest.raises(
            CorruptedObjectError,
            match=rf"{SECOND}.* put it back.* may be there and whole, .*Without a copy, begin a new",
        ):
            raise result
        stopped.store.write(SECOND, copy)
        seen = {}
        assert identical(stopped.live(resume=True, until=8, seen=seen))
        assert seen == dict.fromkeys(range(2), (8, 16, 0))

    def test_what_was_given_up_raises_no_alarm_again(self, stopped, tmp_path, harm):
        stopped.live(resume=True, until=4)
        lost = stored(stopped)["run"]
        assert names(stopped, lost[:16]) >= {"commit", "inner", "state"}
        self.harm(stopped, SECOND, harm)
        assert identical(stopped.live(resume="newest-whole", until=5))
        third = stored(stopped, keys_lab.manifest_key(3))
        assert third["given_up"] == [lost[:16]]
        assert lost not in [earlier["run"] for earlier in third["earlier"]]
        assert names(stopped, lost[:16]) == {"commit"}
        stopped.live(resume=True, ranks=[0])  # nobody comes, so it fails
        assert keys_lab.claim_key(0, 4) in stopped.store.objects
        assert export(in_folder(stopped, tmp_path / "run"), tmp_path / "model") == 5
        assert identical(stopped.live(resume=True))
        manifests = keys_lab.keys_of(stopped.store.objects, "manifest", copy=False)
        newest = max(manifests, key=lambda key: keys_lab.kept(key).life)
        assert stored(stopped, newest)["given_up"] == [lost[:16]]


class Stale(SimulatedStore):
    """A store whose listings of later manifests still show the second one."""

    def below(self, prefix):
        listing = super().below(prefix)
        if prefix.startswith(keys_lab.LATER_MANIFESTS):
            listing.setdefault(SECOND, 1)
        return listing


def test_one_that_a_listing_shows_and_that_is_gone_is_not_passed_over_in_silence(twice):
    """Somebody deletes it at this moment, or the listing is older than that."""
    run = Run(2, store=Stale(), lives=twice.lives)
    for key, data in twice.store.objects.items():
        if key not in {SECOND, SECOND_COPY}:
            run.store.write(key, data)
    refused(run, CorruptedObjectError, rf"{SECOND} and its copy are gone.*newest-whole")
    seen = {}
    assert identical(run.live(resume="newest-whole", seen=seen))
    assert {place[:2] for place in seen.values()} == {(3, 6)}, "as the first manifest says"
