"""Test that what is shown of a URI holds no password, however it was written."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_core._store._guard import endpoint
from diloco_core._store._guard import without_secrets as redact


def redact_uri(uri):
    """The URI as errors show that of an endpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", uri)
        return endpoint("s3://bucket")


UNCHANGED = (
    "https://host/page#section", "./a:b@c", "../a:b@c", "~/a:b@c", "a@b/c:d", "file:///a:b@c#d",
    "s3://bucket/user@host/run", "s3://bucket/run", "http://host:9000/run", "/a/folder:with@signs",
    "s3://",
)  # fmt: skip


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://key:secret@bucket/run", "s3://<redacted>@bucket/run"),
        ("s3://token@bucket/run", "s3://<redacted>@bucket/run"),
        ("s3://key:sec/ret+x==@bucket/run", "s3://<redacted>@bucket/run"),
        ("s3://key:s@e/c@bucket/run", "s3://<redacted>@bucket/run"),
        ("s3://key:a?b#c@bucket/run", "s3://<redacted>@bucket/run"),
        ("fsspec+s3://key:secret@bucket", "fsspec+s3://<redacted>@bucket"),
        ("az://box/run?sv=2022&sig=abc%2Fdef&se=1", "az://box/run?sv=2022&sig=<redacted>&se=1"),
        (
            "s3://b?aws_secret_access_key=x&region=eu",
            "s3://b?aws_secret_access_key=<redacted>&region=eu",
        ),
        ("s3://bucket?X-Amz-Security-Token=x", "s3://bucket?X-Amz-Security-Token=<redacted>"),
        ("s3://bucket/run#secret", "s3://bucket/run#<redacted>"),
        ("memory://key:secret@x/y#z", "memory://<redacted>@x/y#<redacted>"),
        ("s3:///key:sec/ret@x/y", "s3://<redacted>@x/y"),
        ("s3:/key:secret@bucket/x", "s3:/<redacted>@bucket/x"),
        ("fsspec+s3:/key:sec/r@t@bucket/x", "fsspec+s3:/<redacted>@bucket/x"),
        ("s3:\\key:secret@bucket", "s3:\\<redacted>@bucket"),
        ("s3:key:secret@bucket/x", "s3:<redacted>@bucket/x"),
        ("s3//key:secret@bucket/x", "s3//<redacted>@bucket/x"),
        ("//key:secret@host/x", "//<redacted>@host/x"),
        ("key:secret@bucket/x", "key:<redacted>@bucket/x"),
        ("s3:/token@bucket/x", "s3:/<redacted>@bucket/x"),
        ("a/b:c@d", "<redacted>@d"),
        *((uri, uri) for uri in UNCHANGED),
    ],
)
def test_a_uri_is_shown_without_its_secrets(uri, shown):
    assert redact_uri(uri) == shown
    assert redact_uri(shown) == shown


@given(
    user=st.text("abc:/@?#%+= é'\\", max_size=8),
    password=st.text("xyz:/@?#%+=é'\\", min_size=1, max_size=12),
)
def test_no_password_is_shown_in_any_spelling(user, password):
    password = f"PW{password}WP"
    for spelled in (password, quote(password, safe="")):
        uri = f"s3://{user.replace('@', '').replace(':', '').replace('/', '')}:{spelled}@bucket/run"
        message = (
            f"{uri} {uri!r}: bucket {uri.removeprefix('s3://')!r}, "
            f"password {password} ({password!r}, {spelled})"
        )
        for shown in (redact_uri(uri), redact(message, uri), redact(message.replace(uri, ""), uri)):
            assert "PW" not in shown
            assert "WP" not in shown


@pytest.mark.parametrize("sign", "/?#@:")
def test_nor_is_a_piece_of_one(sign):
    """What takes a URI for another one takes the password apart."""
    uri = f"ftp://u:hun{sign}ter2@host/x"
    shown = redact("Port could not be cast to integer value as 'hun': host ter2@host", uri)
    assert shown == "Port could not be cast to integer value as '<redacted>': host <redacted>@host"


@pytest.mark.parametrize(
    ("message", "uri", "shown"),
    [
        ("cannot reach 'https://u:p@host/x'", "", "cannot reach 'https://<redacted>@host/x'"),
        ("GET https://a.b/c?sig=1234&x=2", "", "GET https://a.b/c?sig=<redacted>&x=2"),
        # Short secrets do not tear words apart.
        ("access for a (password: ss)", "s3://a:ss@b/c", "access for a (password: <redacted>)"),
        ("at s3://b/run: 403, see https://docs.example/x?page=2", "s3://b/run", None),
    ],
)
def test_messages(message, uri, shown):
    assert redact(message, uri) == (shown or message)
