"""How much a launcher reads of what others have written."""

import io

import pytest

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import (
    LINE_BYTES,
    OUTCOME_BYTES,
    RECORD_BYTES,
    RESULT_BYTES,
    check_size,
    read_bounded,
)

MIB = 1 << 20


def test_the_bounds_are_those_that_the_pages_name():
    bounds = RESULT_BYTES, OUTCOME_BYTES, RECORD_BYTES, LINE_BYTES
    assert bounds == (16 * MIB, 17 * MIB, 8 * MIB, MIB)


@pytest.mark.parametrize("most", [1, 10, MIB, 3 * MIB])
def test_exactly_the_bound_is_read_and_a_byte_more_is_not(most):
    check_size("it", most, most)
    assert read_bounded(io.BytesIO(b"x" * most), most, "it") == b"x" * most
    for call in (
        lambda: check_size("it", most + 1, most),
        lambda: read_bounded(io.BytesIO(b"x" * (most + 1)), most, "it"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^it is larger than {most} bytes"):
            call()


class Endless:
    """Gives as much as it is asked for, or a byte at a time."""

    def __init__(self, piece):
        self.piece, self.asked, self.given = piece, [], 0

    def read(self, size):
        self.asked.append(size)
        data = b"x" * min(size, self.piece)
        self.given += len(data)
        return data


@pytest.mark.parametrize("piece", [1, 1000, 1 << 40])
def test_what_has_no_end_is_read_to_the_bound_in_pieces(piece):
    most = 5 * MIB if piece > 1 else 5000
    file = Endless(piece)
    with pytest.raises(InvalidRequestError, match="is larger than"):
        read_bounded(file, most, "it")
    assert file.given == most + 1
    assert max(file.asked) <= MIB
