"""The codecs by name."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from .._checks import kind_of
from .._errors import ConfigurationError
from ._blocks import BlockCodec
from ._cast import Cast
from ._compiled import CompiledCodec, build, compiled, seconds
from ._float4 import E2M1, E3M0
from ._formulas import FORMULAS
from ._int8 import Int8
from ._plain import PLAIN
from ._six_sigma import SixSigma
from ._top_k import TopK

if TYPE_CHECKING:
    from ._codec import Codec

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        PLAIN,
        Cast("fp32", torch.float32),
        Cast("bf16", torch.bfloat16),
        Cast("fp16", torch.float16),
        Int8(),
        SixSigma(),
        E2M1(),
        E3M0(),
        TopK(64),
        TopK(128),
    )
}

_lock = threading.Lock()
_made: dict[str, Codec] = {}

_MEMBERS = ("name", "plain", "block", "size", "encode", "decode")


def find_codec(given: object) -> Codec:
    """The codec that an argument means: one of ours by its name, or an object that is one.

    Raises:
        ConfigurationError: It is neither; the message says what there is.
    """
    if isinstance(given, CompiledCodec):
        return given
    names = ", ".join(CODECS)
    if isinstance(given, str):
        if given not in CODECS:
            raise ConfigurationError(
                f"codec must be one of {names}, or a codec of your own, not {given!r}"
            )
        return CODECS[given]
    missing = [name for name in _MEMBERS if not hasattr(given, name)]
    if missing or isinstance(given, type):
        lacks = " (a class; give an object of it)" if isinstance(given, type) else ""
        if not lacks and len(missing) < len(_MEMBERS):
            lacks = f", which lacks {', '.join(missing)}"
        raise ConfigurationError(
            f"codec must be one of {names}, or a codec of your own, not {'None' if given is None else kind_of(given)}{lacks}"
        )
    codec: Codec = given  # type: ignore[assignment]  # it has all members
    _check_own(codec)
    return codec


def compile_codec(name: str) -> Codec:
    """A codec of which torch's compiler has made faster code, for ``DiLoCo(codec=compile_codec("int8"))``.

    It encodes to the same bytes, and replicas may use it or not. To compile takes some seconds when this is called (up to a
    minute where the machine is busy), and happens at no other time. It needs a C++ compiler such as g++. Without one, or if the
    compiled code does not give the same bytes on this machine in a test that is made here, the codec runs as it does without
    this function, which the log says (level warning). If it is quicker without compiled code when it encodes, or when it
    decodes, it does that as usual: some processors gain less than others (level info). Each codec is compiled once per
    process, with as many threads as ``torch.get_num_threads()`` says then. Thread-safe.

    Args:
        name: ``"int8"``, ``"e2m1"`` or ``"e3m0"``. The other codecs would hardly gain from it.

    Raises:
        ConfigurationError: The codec is another one.
    """
    if not isinstance(name, str) or name not in FORMULAS:
        raise ConfigurationError(
            f"only {', '.join(FORMULAS)} can be compiled, not {repr(name) if isinstance(name, str) else kind_of(name)}: pass "
            "other codecs to codec= as they are"
        )
    with _lock:
        if name not in _made:
            codec = CODECS[name]
            assert isinstance(codec, BlockCodec)
            _made[name] = compiled(codec, build, seconds)
        return _made[name]


def _check_own(codec: Codec) -> None:
    """Refuse a codec of somebody else's that cannot be used, or is taken for one of ours."""
    for what, value, kind in (("name", codec.name, str), ("plain", codec.plain, bool)):
        if not isinstance(value, kind) or value == "":
            raise ConfigurationError(
                f"the {what} of a codec must be {'text' if kind is str else 'True or False'}, not {value!r}"
            )
    if isinstance(codec.block, bool) or not isinstance(codec.block, int) or codec.block < 1:
        raise ConfigurationError(
            f"the block of codec {codec.name!r} must be a number of elements, 1 or more, not {codec.block!r}"
        )
    if CODECS.get(codec.name, codec) is not codec:
        raise ConfigurationError(
            f"a codec of your own is named {codec.name!r}, like one of diloco-core: replicas compare codecs by their names, so "
            "give it another name"
        )
