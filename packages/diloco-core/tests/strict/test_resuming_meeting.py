"""How the replicas meet that continue a strict run."""

from dataclasses import replace

import pytest
from strict_lab import manifest
from training_lab import Clock

from diloco_core import (
    RendezvousTimeoutError,
    RunExistsError,
    Timing,
)
from diloco_core._exchange._base import Schema
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._liveness import Liveness
from diloco_core._strict._records._records import Claim, claim_key
from diloco_core._strict._resume._meeting import Meeting, claim_again, meeting_key
from diloco_core._wire._sealed import seal


def claimed(store, world_size, rank, life, nonce, timing):
    """The claim of a process that has just taken a rank."""
    schema = Schema({}, {})
    new = Claim.of_this_process(rank, world_size, "", 64, schema, nonce, 10.0)
    own_claim = replace(new, life=life)
    claim_again(store, own_claim, schema, timing)
    return own_claim


def test_they_have_met_only_when_all_say_the_same(tmp_path):
    """Rank 2 is started once more in the middle; what rank 1 said before that is no answer to it."""
    clock, folder = Clock(), open_store(str(tmp_path / "run"))
    schema = Schema({}, {})

    def arrive(rank, life, nonce):
        return claimed(store, 3, rank, life, nonce, timing)

    def say(rank, life, *nonces):
        key = meeting_key(rank, life)
        folder.put(key, [seal("meeting", key, {"rank": rank, "nonces": list(nonces)})])

    later = {
        2.0: lambda: arrive(2, 2, "two"),
        4.0: lambda: arrive(2, 3, "three"),
        6.0: lambda: say(2, 3, "mine", "one", "three"),
        8.0: lambda: say(1, 2, "mine", "one", "three"),
    }

    def sleep(seconds):
        clock.sleep(seconds)
        for due in [due for due in later if due <= clock.now]:
            later.pop(due)()

    timing = Timing(clock=clock, sleep=sleep)
    store = Patient(folder, timing)
    liveness = Liveness(store, 0, 3, timing, "mine")
    liveness.life = 2
    own_claim = arrive(0, 2, "mine")
    arrive(1, 2, "one")
    say(1, 2, "mine", "one", "two")
    meeting = Meeting(store, own_claim, manifest(ranks=3), timing, liveness)
    meeting.meet(schema)
    assert clock.now >= 8.0
    assert [claim.nonce for claim in meeting.claims] == ["mine", "one", "three"]


def test_another_process_of_the_same_rank_is_noticed_while_it_meets(tmp_path):
    """On a store that does not create exclusively, the later one has overwritten the claim."""
    clock, folder = Clock(), open_store(str(tmp_path / "run"))
    timing = Timing(clock=clock, sleep=clock.sleep)
    store, schema = Patient(folder, timing), Schema({}, {})
    own_claim = claimed(store, 2, 0, 2, "mine", timing)
    folder.put(claim_key(0, 2), [replace(own_claim, nonce="theirs").to_bytes()])
    meeting = Meeting(store, own_claim, manifest(), timing, Liveness(store, 0, 2, timing, "mine"))
    with pytest.raises(RunExistsError, match=r"rank 0 of .* is taken by"):
        meeting.meet(schema)
    assert clock.now < 60.0
    with pytest.raises(RunExistsError, match=r"another process resumes rank 0 .* at this moment"):
        claimed(store, 2, 0, 2, "mine", timing)


def test_what_was_damaged_for_a_while_only_is_not_named_when_time_is_up(tmp_path):
    clock, folder, schema = Clock(), open_store(str(tmp_path / "run")), Schema({}, {})
    key, records = claim_key(1, 2), []

    def sleep(seconds):
        clock.sleep(seconds)
        if clock.now > 5.0:
            folder.put(key, records)

    timing = Timing(clock=clock, sleep=sleep, join_timeout=50.0)
    store = Patient(folder, timing)
    claimed(store, 2, 1, 2, "one", timing)
    records.append(folder.get(key))
    folder.put(key, [b"torn"])
    own_claim = claimed(store, 2, 0, 2, "mine", timing)
    liveness = Liveness(store, 0, 2, timing, "mine")
    liveness.life = 2
    with pytest.raises(RendezvousTimeoutError, match="missing: rank 1") as raised:
        Meeting(store, own_claim, manifest(), timing, liveness).meet(schema)
    assert "claims/" not in str(raised.value)
