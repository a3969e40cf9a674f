"""A certificate for one server, made by the ``openssl`` command."""

from __future__ import annotations

import functools
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path

from ._errors import StandInError

_EXTENSIONS = """\
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
subjectAltName=IP:127.0.0.1,DNS:localhost
"""


def available() -> bool:
    """Return whether certificates can be made here: Python's standard library cannot make them."""
    return shutil.which("openssl") is not None


@functools.cache
def make() -> tuple[ssl.SSLContext, str]:
    """Return a context for the servers of this process, and the authority to trust (PEM).

    The keys are on disk only for the moment in which they are made; the certificates are valid for
    30 days.

    Raises:
        StandInError: there is no ``openssl``, or it fails.
    """
    with tempfile.TemporaryDirectory(prefix="stand-in-") as folder:
        return _make(Path(folder))


def _make(folder: Path) -> tuple[ssl.SSLContext, str]:
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    authority = (
        "-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign"
    )
    signing = "-CA ca.pem -CAkey ca.key -CAcreateserial -extfile extensions"
    (folder / "extensions").write_text(_EXTENSIONS)
    own = ("-keyout", "ca.key", "-out", "ca.pem", "-days", "30", "-subj", "/CN=stand-in CA")
    _openssl(folder, f"req -x509 {key} {authority}", *own)
    _openssl(folder, f"req {key} -keyout server.key -out server.csr -subj /CN=stand-in")
    _openssl(folder, f"x509 -req -in server.csr -out server.pem -days 30 {signing}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return context, (folder / "ca.pem").read_text()


def _openssl(folder: Path, command: str, *more: str) -> None:
    words = [*command.split(), *more]
    try:
        subprocess.run(
            ["openssl", *words], cwd=folder, check=True, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        raise StandInError(
            "TLS needs the command openssl, which is not here; install it, or pass tls=False"
        ) from None
    except subprocess.CalledProcessError as wrong:
        raise StandInError(f"openssl {words[0]} failed: {wrong.stderr.strip()}") from None
