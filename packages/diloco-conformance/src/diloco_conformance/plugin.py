"""The option that this package adds to pytest: ``--diloco-seed``.

pytest loads it by itself where the package is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("diloco").addoption(
        "--diloco-seed",
        type=int,
        metavar="NUMBER",
        help="choose the sequences that the state machine of diloco-conformance tries",
    )
