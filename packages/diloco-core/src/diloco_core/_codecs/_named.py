"""The codecs by name."""

from __future__ import annotations

import torch

from .._checks import kind_of, whole
from .._errors import ConfigurationError
from ._codec import Codec
from ._float4 import E2M1
from ._int8 import Int8
from ._plain import PLAIN, Cast
from ._top_k import TopK

_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
_OURS = PLAIN, Cast("fp32", _FP32), Cast("bf16", _BF16), Cast("fp16", _FP16), Int8(), E2M1()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (*_OURS, TopK(64), TopK(128))}

_MEMBERS = ("name", "plain", "block", "size", "encode", "decode")


def find_codec(given: object) -> Codec:
    """The codec that an argument means: one of ours by its name, or an object that is one.

    Raises:
        ConfigurationError: It is neither; the message says what there is.
    """
    if isinstance(given, str) and given in CODECS:
        return CODECS[given]
    missing = [name for name in _MEMBERS if not hasattr(given, name)]
    if missing or isinstance(given, type):
        what = repr(given) if given is None or isinstance(given, str) else kind_of(given)
        if isinstance(given, type):
            what += " (a class; give an object of it)"
        elif len(missing) < len(_MEMBERS):
            what += f", which lacks {', '.join(missing)}"
        raise ConfigurationError(
            f"codec must be one of {', '.join(CODECS)}, or a codec of your own, not {what}"
        )
    codec: Codec = given  # type: ignore[assignment]  # it has all members
    if not isinstance(codec.name, str) or not codec.name:
        raise ConfigurationError(f"the name of a codec must be text, not {codec.name!r}")
    if not isinstance(codec.plain, bool):
        raise ConfigurationError(
            f"the plain of codec {codec.name!r} must be True or False, not {codec.plain!r}"
        )
    whole(f"the block of codec {codec.name!r}", codec.block)
    if CODECS.get(codec.name, codec) is not codec:
        raise ConfigurationError(
            f"a codec of your own is named {codec.name!r}, like one of diloco-core: replicas "
            "compare codecs by their names, so give it another name"
        )
    return codec
