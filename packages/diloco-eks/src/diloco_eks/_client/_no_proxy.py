"""The meaning of NO_PROXY for kubectl, which is its meaning for Go.

https://pkg.go.dev/golang.org/x/net/http/httpproxy
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PORTS = {"http": 80, "https": 443}
# HOST, HOST:PORT or [ADDRESS]:PORT; an IPv6 address has more than one colon.
_ENTRY = re.compile(r"(?:\[(?P<inside>[^\]]*)\]|(?P<host>[^:]*)):(?P<port>[^:]*)|(?P<alone>.*)")


def needs_no_proxy(server: SplitResult, no_proxy: str) -> bool:
    """Return whether requests go to a server directly, whatever proxy is set.

    Args:
        server: Address of the server.
        no_proxy: Value of the variable: hosts, addresses and networks, separated by commas.
    """
    host, port = (server.hostname or "").lower(), server.port or _PORTS.get(server.scheme, 0)
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    entries = (entry.strip().lower() for entry in no_proxy.split(","))
    return any(entry == "*" or _matches(entry, host, str(port), address) for entry in entries)


def _matches(entry: str, host: str, port: str, address: _Address | None) -> bool:
    if re.search(r"/\d+$", entry):
        try:
            return address is not None and address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    match = _ENTRY.fullmatch(entry)
    if match is None:
        return False
    name = match["inside"] or match["host"] or match["alone"] or ""
    if not name or (match["port"] and match["port"] != port):
        return False
    if (named := _address(name)) is not None:
        return named == address
    name = name[1:] if name.startswith("*.") else name
    below = name if name.startswith(".") else f".{name}"
    return host.endswith(below) or host == name


def _address(text: str) -> _Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
