"""What has led to an error of ours is printed with it, and shows no secret either."""

import logging
import subprocess
import sys
import traceback

import pytest

from diloco_protocol import BackendError, DilocoError

SECRET = "hunter2Zq"
TEXT = f"the webhook refuses DB_PASSWORD={SECRET} at https://u:{SECRET}@h \x1b[2J"


class ApiError(Exception):
    """As clients have them: its text is not in its arguments."""

    def __init__(self, body):
        self.body = body

    def __str__(self):
        return f"HTTP response body: {self.body}"


class Slotted(ApiError):
    __slots__ = ("more",)


def raised(cause):
    """An error of ours that a client's has led to."""
    try:
        try:
            raise cause
        except Exception as error:
            raise BackendError("the cluster refuses it") from error
    except BackendError as error:
        return error


def within(error):
    try:
        raise RuntimeError(TEXT) from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    "cause",
    [
        *(ApiError(TEXT), Slotted(TEXT), ValueError(TEXT), KeyError(TEXT), ConnectionError(TEXT)),
        *(OSError(2, TEXT, TEXT, None, TEXT), within(ApiError(TEXT)), DilocoError(TEXT)),
        ExceptionGroup(TEXT, [ApiError(TEXT), ValueError(TEXT)]),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_a_traceback_shows_no_secret(cause, caplog):
    error = raised(cause)
    logging.getLogger("test").error("it failed", exc_info=error)
    for shown in ("".join(traceback.format_exception(error)), caplog.text):
        assert SECRET not in shown
        assert "\x1b" not in shown
        assert "the webhook refuses DB_PASSWORD=<redacted>" in shown
    assert error.__cause__ is cause


def test_what_leads_to_it_without_from_shows_none_either():
    try:
        raise ApiError(TEXT)
    except ApiError:
        error = BackendError("it failed")
        error.__context__ = sys.exception()
    shown = "".join(traceback.format_exception(error))
    assert "ApiError" in shown
    assert SECRET not in shown


def test_python_itself_prints_none():
    """Python does so for an uncaught error, and asks no method of the error for its cause."""
    lines = [
        "from diloco_protocol import BackendError",
        "class ApiError(Exception): pass",
        f"try: raise ApiError({TEXT!r})",
        "except ApiError as error: raise BackendError('it failed') from error",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert "ApiError: the webhook refuses DB_PASSWORD=<redacted>" in ended.stderr
    assert SECRET not in ended.stderr


def test_it_is_still_the_exception_that_it_was():
    cause = ApiError(TEXT)
    raised(cause)
    raised(cause)
    assert isinstance(cause, ApiError)
    assert cause.body == TEXT
    assert type(cause).__name__ == "ApiError"
    assert type(cause).__mro__[1] is ApiError
    harmless = ApiError("not found")
    raised(harmless)
    assert type(harmless) is ApiError


def test_notes_are_cleaned_too():
    cause = ApiError("x")
    cause.add_note(TEXT)
    assert SECRET not in "".join(traceback.format_exception(raised(cause)))


def test_one_that_has_no_text_is_left_as_it_is():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    assert "it failed" not in "".join(traceback.format_exception(raised(Odd())))


def test_messages_have_a_bounded_length():
    message = str(BackendError(f"env has {'a' * 200_000}: give another"))
    assert message.startswith("env has aaa")
    assert message.endswith("aaa: give another")
    assert len(message) <= 16_000
    assert str(BackendError(message)) == message
    cause = ApiError("a" * 200_000)
    raised(cause)
    assert len(str(cause)) < 17_000
