"""NO_PROXY means what it means to kubectl."""

from urllib.parse import urlsplit

import pytest

from diloco_eks._client._no_proxy import needs_no_proxy


@pytest.mark.parametrize(
    ("server", "no_proxy"),
    [
        ("https://localhost:6443", ""),
        ("https://127.0.0.9:6443", ""),
        ("https://[::1]:6443", ""),
        ("https://k.example.test:6443", "*"),
        ("https://192.0.2.9:6443", "localhost, *"),
        ("https://k.example.test:6443", "example.test"),
        ("https://example.test:6443", "example.test"),
        ("https://K.example.test:6443", ".Example.test"),
        ("https://k.example.test:6443", "other, *.example.test"),
        ("https://k.example.test:6443", "example.test:6443"),
        ("https://k.example.test", "example.test:443"),
        ("http://k.example.test", "*.example.test:80"),
        ("https://192.0.2.9:6443", "192.0.2.9"),
        ("https://192.0.2.9:6443", "192.0.2.9:6443"),
        ("https://192.0.2.9:6443", "192.0.2.0/24"),
        ("https://192.0.2.9:6443", "192.0.2.77/24"),
        ("https://[2001:db8::9]:6443", "2001:db8::9"),
        ("https://[2001:db8::9]:6443", "2001:DB8:0::9"),
        ("https://[2001:db8::9]:6443", "[2001:db8::9]:6443"),
        ("https://[2001:db8::9]:6443", "2001:db8::/32"),
    ],
)
def test_directly(server, no_proxy):
    assert needs_no_proxy(urlsplit(server), no_proxy)


@pytest.mark.parametrize(
    ("server", "no_proxy"),
    [
        ("https://k.example.test:6443", ""),
        ("https://k.example.test:6443", ",, :6443,/8"),
        ("https://example.test:6443", ".example.test"),
        ("https://example.test:6443", "*.example.test"),
        ("https://k.example.test:6443", "*example.test"),
        ("https://k-example.test:6443", "example.test"),
        ("https://k.example.test:6443", "example.test:443"),
        ("https://k.example.test:6443", "192.0.2.0/24"),
        ("https://192.0.2.9:6443", "192.0.2.9:443"),
        ("https://192.0.2.9:6443", "192.0.3.0/24"),
        ("https://192.0.2.9:6443", "192.0.2.0/255.255.255.0"),
        ("https://192.0.2.9:6443", "192.0.2.0/99"),
        ("https://[2001:db8::9]:6443", "[2001:db8::9]"),
        ("https://[2001:db8::9]:6443", "192.0.2.9"),
    ],
)
def test_through_a_proxy(server, no_proxy):
    assert not needs_no_proxy(urlsplit(server), no_proxy)
