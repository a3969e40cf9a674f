"""Texts of records that are cut: they keep no part of a secret that no longer looks like one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import Outcome, outcome_from_message, outcome_to_message
from diloco_protocol._fields import TEXT_CHARACTERS, shorten

PASSWORD = "S3cr3tThatIsRatherLong0123456789ABCDEFGHIJKLMN"
FORMS = (
    f"postgres://admin:{PASSWORD}@db/x",
    f"--password={PASSWORD}",
    f"Authorization: Bearer {PASSWORD}",
)


def leaks(text):
    return [PASSWORD[n : n + 6] for n in range(len(PASSWORD) - 5) if PASSWORD[n : n + 6] in text]


@pytest.mark.parametrize("form", FORMS)
@given(before=st.integers(0, 400), after=st.integers(0, 400), room=st.integers(0, 300))
def test_a_secret_across_a_cut(form, before, after, room):
    text = f"{'a' * before} {form} {'b' * after}"
    short = shorten(text, room)
    if len(text) > room:
        assert not leaks(short)
        assert len(short) <= max(room, 17)
    else:
        assert short == text


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_the_longest_texts(form):
    half = TEXT_CHARACTERS // 2
    text = "a " * ((half - 40) // 2) + form + " b" * TEXT_CHARACTERS
    outcome = Outcome(1, error=text, traceback=text[::-1] + form)
    found = Outcome.from_json(outcome.to_json())
    assert not leaks(found.error)
    assert not leaks(found.traceback)
    assert not leaks(outcome_to_message(outcome)[0])


@pytest.mark.parametrize("form", FORMS)
def test_a_message_of_a_few_kib(form):
    outcome = Outcome(1, error="a " * 490 + form + "\nb" + " b" * 2000)
    message = outcome_from_message(outcome_to_message(outcome)[0]).outcome
    assert not leaks(message.error)
    assert message.error.startswith("a a ")
    assert message.error.endswith(" b b")
