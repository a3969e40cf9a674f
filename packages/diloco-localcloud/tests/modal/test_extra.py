"""The package without the extra ``modal``."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
for name in ("modal", "modal_proto", "grpclib", "google"):
    sys.modules[name] = None  # as if it were not installed
import diloco_localcloud
try:
    diloco_localcloud.ModalStandIn().start()
except diloco_localcloud.StandInError as wrong:
    print(wrong)
"""


def test_only_the_start_needs_it():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert "install diloco-localcloud with its extra: diloco-localcloud[modal]" in done.stdout
