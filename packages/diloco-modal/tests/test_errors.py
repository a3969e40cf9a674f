"""Which error of the protocol stands for which of Modal's client."""

import sys

import pytest
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from modal import exception as modal_errors
from modal._utils import http_utils

from diloco_modal import _client
from diloco_modal._client._errors import DenseLogError, MissingError, bounded, meant
from diloco_modal._client._import import import_modal
from diloco_protocol import (
    AuthError,
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    MissingDependencyError,
    QuotaExceededError,
    ThrottledError,
    UnavailableError,
)

KNOWN = [
    (modal_errors.NotFoundError, MissingError, False),
    (modal_errors.OutputExpiredError, MissingError, False),
    (modal_errors.ResourceExhaustedError, ThrottledError, True),
    (modal_errors.AuthError, AuthError, False),
    (modal_errors.PermissionDeniedError, ForbiddenError, False),
    (modal_errors.ServiceError, UnavailableError, True),
    (modal_errors.InternalError, UnavailableError, True),
    (modal_errors.ConnectionError, UnavailableError, True),
    (modal_errors.ClientClosed, UnavailableError, True),
    (modal_errors.LogsFetchError, DenseLogError, False),
    (StreamTerminatedError, UnavailableError, True),
    (ProtocolError, UnavailableError, True),
    (modal_errors.InvalidError, InvalidRequestError, False),
]


@pytest.mark.parametrize(("theirs", "ours", "retryable"), KNOWN)
def test_errors_of_the_client(theirs, ours, retryable):
    error = meant(theirs("no such thing"), "looking")
    assert type(error) is ours
    assert error.retryable is retryable
    assert str(error).startswith("looking: ")
    assert "no such thing" in str(error)


def test_our_own_stay_as_they_are():
    error = QuotaExceededError("enough")
    assert meant(error, "looking") is error


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (ConnectionRefusedError(111, "refused"), True),
        (TimeoutError(), True),
        (KeyError("x"), False),
    ],
)
def test_what_the_network_says_may_pass(error, retryable):
    told = meant(error, "looking")
    assert isinstance(told, BackendError)
    assert told.retryable is retryable
    assert str(told).startswith(f"looking: {type(error).__name__}")


def test_a_call_has_the_time_that_it_is_given():
    assert bounded(lambda: 3, 60.0, "looking") == 3
    with pytest.raises(SystemExit):
        bounded(lambda: sys.exit(3), 60.0, "looking")


def test_a_client_in_which_something_has_moved_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "diloco_modal._client._wire")
    monkeypatch.delattr(_client, "_wire")
    monkeypatch.delattr(http_utils, "ClientSessionRegistry")
    with pytest.raises(
        MissingDependencyError, match=r"ClientSessionRegistry.*pip install 'modal>=1\.5\.5,<1\.7'"
    ):
        import_modal()
