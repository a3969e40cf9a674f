"""Messages that say a thing once, in whole sentences, and what to do next."""

import pytest

import diloco_core
from diloco_core._exchange._endings import Ending, Progress, conclude


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("rank 1 is away for 9 s.", "rank 1 is away for 9 s (as rank 2 found after 1 sync)"),
        (
            "it is gone",
            "rank 1 is lost, as rank 2 found after 1 sync: ReplicaLostError: it is gone",
        ),
    ],
)
def test_who_is_lost_is_said_once(message, text):
    ending = Ending(2, "failed", Progress(2, 1), f"ReplicaLostError: {message}", 1)
    assert str(conclude({2: ending}, [1, 2], 0, Progress(2, 1))) == text


def test_what_would_only_come_again_is_not_started_again():
    """The runner ends a replica for good whose error says so."""
    final = {
        name
        for name in diloco_core.__all__
        if isinstance(kind := getattr(diloco_core, name), type)
        and issubclass(kind, diloco_core.CoreError)
        and kind.final
    }
    assert final == {
        "AfterRunError",
        "ConfigurationError",
        "FencedError",
        "MismatchError",
        "RunExistsError",
    }
