"""Wrong versions of fixed membership are caught by simulated runs."""

import math
from dataclasses import replace

import pytest
from faults_lab import assert_caught
from fixed_lab import random_ended_run, random_run

from diloco_core._run import _claims, _exchange, _joining
from diloco_core._run._incarnation._incarnation import Incarnation
from diloco_core._run._policy import _ends
from diloco_core._run._records._records import read_record
from diloco_core._run._round._shares import Shares
from diloco_core._run._states import _publish, _rollback
from diloco_core._run._sync import _adopt, _compute, _sync
from diloco_core._store._patient import Patient
from diloco_core._wire._published import shard_metadata

KINDS = ("kill before", "kill after", "zombie", "lose answer", "tear", "delay")
MOST = 120


def others_take_over_shards(monkeypatch):
    """Each rank's own part of a contribution is known to nobody else."""
    turn = Shares.turn

    def soon(self, shard):
        found = turn(self, shard)
        return self.grace if math.isinf(found) else found

    monkeypatch.setattr(Shares, "turn", soon)


def own_bytes_in_place_of_the_published_ones(monkeypatch):
    """What this incarnation has computed counts only if the store holds it."""
    monkeypatch.setattr(
        _compute.Computation, "_is_same", lambda self, shard: bool(_settled(self, shard))
    )


def _settled(computation, shard):
    result = computation._result
    stored = result.shard(shard)
    result.settle(shard, *stored.sums(shard_metadata(result.job, result.sync)))
    return True


def a_sync_is_decided_without_all(monkeypatch):
    """With a quorum of one."""
    on_look = _sync.rounds.on_look

    def early(at, folder, *, overdue, expired):
        if folder is not None and at.rank in folder.chosen:
            return _sync.rounds.Create(tuple(folder.chosen.values()))
        return on_look(at, folder, overdue=overdue, expired=expired)

    monkeypatch.setattr(_sync.rounds, "on_look", early)


def _puts(monkeypatch, written):
    """Puts what must be created, if ``written`` is true of its key and its bytes."""
    create = Patient.create

    def mutant(self, key, parts):
        data = parts()
        data = data if isinstance(data, bytes) else b"".join(map(bytes, data))
        if not written(key, data):
            return create(self, key, lambda: data)
        self.put(key, lambda: [data])
        return True

    monkeypatch.setattr(Patient, "create", mutant)


def records_are_put(monkeypatch):
    """The last one to write a record decides, in place of the first one."""
    _puts(monkeypatch, lambda key, _: key.startswith("commits/"))


def ends_are_put(monkeypatch):
    """Who gives a rank up takes back what was decided meanwhile."""
    _puts(monkeypatch, lambda key, data: key.startswith("commits/") and b'"end"' in data)


def shards_are_put(monkeypatch):
    """A shard changes while others read it."""
    _puts(monkeypatch, lambda key, _: key.startswith("state/") and key.endswith(".safetensors"))


def an_unknown_answer_counts_as_won(monkeypatch):
    """What this incarnation has computed counts, whatever the store holds."""
    create = Incarnation.create

    def mutant(self, key, parts):
        create(self, key, parts)
        return True

    monkeypatch.setattr(Incarnation, "create", mutant)


def who_commits_keeps_its_own_list(monkeypatch):
    """The record that is read afterwards may be another one."""
    create, read, members = _sync.StoreSync._create, _sync.commit_mended, {}

    def created(self, own):
        members[id(self._incarnation), self._sync] = own
        return create(self, own)

    def mutant(incarnation, sync):
        entry, own = read(incarnation, sync), members.get((id(incarnation), sync))
        if entry is None or own is None:
            return entry
        return replace(entry[0], members=own), entry[1]

    monkeypatch.setattr(_sync.StoreSync, "_create", created)
    monkeypatch.setattr(_sync, "commit_mended", mutant)


def what_a_former_incarnation_contributed_counts_as_own(monkeypatch):
    """What this incarnation holds in memory is not what the record names."""
    fate = _sync.rounds.fate

    def mutant(commit, rank, own, **options):
        named = any(member.rank == rank for member in commit.members)
        return "counted" if named else fate(commit, rank, own, **options)

    monkeypatch.setattr(_sync.rounds, "fate", mutant)


def no_incarnation_is_fenced(monkeypatch):
    for module in (_claims, _exchange, _ends, _adopt):
        monkeypatch.setattr(module, "check_claim", lambda incarnation: None)


def everything_is_deleted_at_the_commit(monkeypatch):
    """Contributions and states from which others still compute."""
    collectable = _publish.collectable

    def mutant(keys, *, last, kept, **options):
        return collectable(keys, last=last, kept=[last] * len(kept), **options)

    monkeypatch.setattr(_publish, "collectable", mutant)


def nobody_obeys_an_end(monkeypatch):
    for module in (_ends, _joining, _rollback):
        for name in {"obey_end", "refuse_ended"} & vars(module).keys():
            monkeypatch.setattr(module, name, lambda *_, **__: None)


def whoever_resumes_passes_every_end(monkeypatch):
    """Also one that was made after its claim, which those who made it obey."""
    for module in (_ends, _rollback):
        obey = module.obey_end

        def mutant(incarnation, record, obey=obey):
            if not incarnation.settings.resume:
                obey(incarnation, record)

        monkeypatch.setattr(module, "obey_end", mutant)


def an_end_has_a_key_of_its_own(monkeypatch):
    """Then the store does not decide between an end and a return."""

    def ends(reader):
        keys = sorted(reader.store.list("ends/"), reverse=True)
        return [read_record(reader.store.get(key), int(key[5:13]), key) for key in keys]

    monkeypatch.setattr(_ends, "commit_key", lambda sync: f"ends/{sync:08}.json")
    monkeypatch.setattr(_joining, "ends_in_log", ends)


@pytest.mark.parametrize(
    ("mutant", "first"),
    [
        (others_take_over_shards, 0),
        (own_bytes_in_place_of_the_published_ones, 0),
        (a_sync_is_decided_without_all, 0),
        (shards_are_put, 13),
        (an_unknown_answer_counts_as_won, 13),
        (who_commits_keeps_its_own_list, 7),
        (what_a_former_incarnation_contributed_counts_as_own, 56),
        (no_incarnation_is_fenced, 34),
        (everything_is_deleted_at_the_commit, 0),
    ],
)
def test_it_is_caught(mutant, first, monkeypatch):
    mutant(monkeypatch)
    assert_caught(lambda seed: random_run(seed, KINDS), first=first, runs=MOST)


@pytest.mark.parametrize(
    ("mutant", "first"),
    [
        (records_are_put, 5),
        (ends_are_put, 5),
        (nobody_obeys_an_end, 1),
        (whoever_resumes_passes_every_end, 22),
        (an_end_has_a_key_of_its_own, 1),
    ],
)
def test_it_is_caught_where_a_run_ends(mutant, first, monkeypatch):
    assert random_ended_run(first) == []
    mutant(monkeypatch)
    assert_caught(random_ended_run, first=first, runs=MOST)
