"""The README is true."""

from pathlib import Path

from diloco_modal import ModalOptions
from diloco_protocol.backend import options_table

README = Path(__file__).parents[1] / "README.md"


def test_it_says_what_was_not_seen():
    text = README.read_text(encoding="utf-8")
    assert "never been run on Modal" in text
    assert "not certified by the conformance suite" in text


def test_the_table_of_options():
    table = README.read_text(encoding="utf-8").partition("<!-- options -->\n")[2]
    table = table.partition("\n<!-- /options -->")[0]
    assert table == options_table(ModalOptions), "print(options_table(ModalOptions)) is it"
