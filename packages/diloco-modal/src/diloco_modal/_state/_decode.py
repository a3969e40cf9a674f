"""Read texts from the formats in which Modal keeps values.

There is no decoder here that could make anything but text of them.
"""

from __future__ import annotations

# Opcodes of pickle, and how many bytes follow each: PROTO, FRAME, MEMOIZE, BINPUT, LONG_BINPUT.
_PASSED_OVER = {0x80: 1, 0x95: 8, 0x94: 0, ord("q"): 1, ord("r"): 4}
# Opcodes of a text, and how many bytes hold its length: SHORT_BINUNICODE, BINUNICODE, BINUNICODE8.
_TEXTS = {0x8C: 1, ord("X"): 4, 0x8D: 8}
_STOP = ord(".")
_MOST_OPCODES = 8
_CBOR_TEXT = 3


def text_in_pickle(data: bytes) -> str | None:
    """Return the text of a pickle that holds one text and nothing else; None for other pickles."""
    at, text = 0, None
    for _ in range(_MOST_OPCODES):
        code, at = data[at] if at < len(data) else _STOP, at + 1
        if code == _STOP:
            return text if at == len(data) else None
        if code in _PASSED_OVER:
            at += _PASSED_OVER[code]
        elif code in _TEXTS and text is None:
            begin = at + _TEXTS[code]
            at = begin + int.from_bytes(data[at:begin], "little")
            text = _decoded(data[begin:at]) if at <= len(data) else None
        else:
            return None
    return None


def text_in_cbor(data: bytes) -> str | None:
    """Return the text of CBOR that holds one text and nothing else; None for other CBOR."""
    kind, short = (data[0] >> 5, data[0] & 31) if data else (0, 0)
    width = 1 << (short - 24) if 24 <= short <= 27 else 0
    if kind != _CBOR_TEXT or short > 27:
        return None
    begin = 1 + width
    size = int.from_bytes(data[1:begin], "big") if width else short
    return _decoded(data[begin:]) if begin + size == len(data) else None


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
