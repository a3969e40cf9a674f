"""Codecs that run as compiled code: the same bytes in less time."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from ._blocks import BlockCodec
from ._formulas import FORMULAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ._codec import Codec
    from ._formulas import Formula

    Function = Callable[..., torch.Tensor | None]
    Build = Callable[[Function, Sequence[torch.Tensor]], Function]
    # Seconds that a codec takes to encode so many values, and to decode them.
    Measure = Callable[[Codec, torch.Tensor], tuple[float, float]]

# Compiled code works on as many values as a chunk of the usual size has. What is left over runs as it does without it.
_VALUES = 2**18
_COMPARED = 2**18  # as many values are encoded and decoded to compare the bytes
_TIMES = 20  # as often they are, to compare the times: some milliseconds

_log = logging.getLogger("diloco_core")


def build(function: Function, examples: Sequence[torch.Tensor]) -> Function:
    """Compile a function for tensors of the shapes, dtypes and strides of the examples.

    Not by ``torch.compile``, which compiles again whenever something else has changed, such as whether gradients are recorded.
    """
    # These take seconds to import, which is why they are not at the top.
    import torch._inductor as inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        graph = make_fx(function)(*examples)
        # In this thread and process: no other is to stay behind.
        return inductor.compile(graph, list(examples), options={"compile_threads": 1})  # type: ignore[no-any-return]


class _Kernels(NamedTuple):
    """Compiled code for a fixed number of blocks.

    Attributes:
        encode: Takes blocks, and fills their heads and bodies. None if the codec is quicker without it.
        decode: Takes heads and bodies together, and fills blocks. None if the codec is quicker without it.
        blocks: The number of blocks.
    """

    encode: Function | None
    decode: Function | None
    blocks: int


class CompiledCodec(BlockCodec):
    """A codec some of whose blocks are encoded and decoded by compiled code; see :class:`._codec.Codec`.

    Args:
        usual: The codec as it is without that.
        formula: What was compiled.
        kernels: The compiled code.
    """

    def __init__(self, usual: BlockCodec, formula: Formula, kernels: _Kernels) -> None:
        super().__init__(usual.name, usual.block)
        self._usual = usual
        self._formula = formula
        self._kernels = kernels

    def row_bytes(self, numel: int) -> int:
        """As without compiled code."""
        return self._usual.row_bytes(numel)

    def encode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Encode as many blocks as possible with compiled code, and the others as usual."""
        encode, blocks = self._kernels.encode, self._kernels.blocks
        for values, data in _pieces(rows, out, blocks):
            # A shorter block at the end comes alone, and is never as many blocks as that.
            if encode is not None and len(values) == blocks:
                encode(values, *_parts(data, self._formula))
            else:
                self._usual.encode_rows(values, data)

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """The reverse."""
        decode, blocks, dtype = self._kernels.decode, self._kernels.blocks, self._formula.decoded
        if out.storage_offset() * out.itemsize % dtype.itemsize:
            decode = None  # torch makes no such view of what begins anywhere
        for values, encoded in _pieces(out, data, blocks):
            if decode is not None and len(values) == blocks:
                decode(encoded, values.view(dtype))
            else:
                self._usual.decode_rows(encoded, values)


def _pieces(
    rows: torch.Tensor, data: torch.Tensor, blocks: int
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Up to so many blocks at a time, and their bytes."""
    # Most chunks are so long. To make a view takes a few hundredths of the time that a copy of the chunk takes.
    if len(rows) == blocks:
        return [(rows, data)]
    return zip(torch.split(rows, blocks), torch.split(data, blocks), strict=True)


def _parts(data: torch.Tensor, formula: Formula) -> tuple[torch.Tensor, torch.Tensor]:
    """The heads and the bodies in the bytes of blocks."""
    width = formula.head.itemsize
    return data.view(formula.head).narrow(1, 0, 1), data.narrow(1, width, data.shape[1] - width)


def compiled(codec: BlockCodec, build: Build, measure: Measure | None = None) -> Codec:
    """The codec with compiled code, or as it is, if there cannot be such code, or it is wrong or gains nothing.

    Args:
        codec: The codec.
        build: Compiles a function.
        measure: Says how long a codec takes, so that compiled code is used only for what it makes quicker. Compilers make
            much of what some processors do with single bytes, and little of it for others. If left out, all of it is used.
    """
    start = time.monotonic()
    try:
        formula = FORMULAS[codec.name]
        kernels = _kernels(codec, formula, build)
        made = CompiledCodec(codec, formula, kernels)
        same = same_bytes(codec, made)
    except Exception as error:  # noqa: BLE001 - compilers have errors of every kind
        _log.warning(
            "codec %r could not be compiled (%s: %s). It runs as it does without compile_codec(), more slowly and with the same "
            "bytes. To compile, torch needs a C++ compiler such as g++.",
            codec.name,
            type(error).__name__,
            (str(error).strip().splitlines() or [""])[0],
        )
        return codec
    if not same:
        _log.warning(
            "the compiled code of codec %r gives other bytes on this machine, and is not used. The codec runs as it does without "
            "compile_codec(), more slowly.",
            codec.name,
        )
        return codec
    if measure is not None:
        kernels = _quicker(codec, made, kernels, measure)
        made = CompiledCodec(codec, formula, kernels)
    used = [name for name in ("encode", "decode") if getattr(kernels, name) is not None]
    _log.info(
        "codec %r was compiled in %.1f s, and uses compiled code to %s",
        codec.name,
        time.monotonic() - start,
        " and to ".join(used) or "do nothing: it is quicker without",
    )
    return made if used else codec


def seconds(codec: Codec, values: torch.Tensor) -> tuple[float, float]:
    """The least time of some encodings and decodings, since what else a machine does only adds to it."""
    data, out = codec.encode(values), torch.empty_like(values)
    encodings, decodings = [], []
    for _ in range(_TIMES):
        moments = [time.perf_counter()]
        codec.encode(values)
        moments.append(time.perf_counter())
        codec.decode(data, out)
        moments.append(time.perf_counter())
        encodings.append(moments[1] - moments[0])
        decodings.append(moments[2] - moments[1])
    return min(encodings), min(decodings)


def _quicker(codec: Codec, made: Codec, kernels: _Kernels, measure: Measure) -> _Kernels:
    """Those of the kernels that take less time than the codec without them."""
    values = torch.randn(_VALUES, generator=torch.Generator().manual_seed(0))
    usual, compiled = measure(codec, values), measure(made, values)
    return kernels._replace(
        encode=kernels.encode if compiled[0] < usual[0] else None,
        decode=kernels.decode if compiled[1] < usual[1] else None,
    )


def _kernels(codec: BlockCodec, formula: Formula, build: Build) -> _Kernels:
    def encode(rows: torch.Tensor, head: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        heads, bodies, factors = formula.encode(rows)
        head.copy_(heads)
        body.copy_(bodies)
        return factors

    def decode(data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(formula.decode(data))

    blocks, cpu = _VALUES // codec.block, torch.device("cpu")
    rows = torch.zeros(blocks, codec.block, dtype=torch.float32, device=cpu)
    data = torch.zeros(blocks, codec.row_bytes(codec.block), dtype=torch.uint8, device=cpu)
    # The compiler refuses examples of different dtypes that share memory. What it makes may be given them.
    (head, _), (_, body) = _parts(data, formula), _parts(data.clone(), formula)
    return _Kernels(
        build(encode, (rows, head, body)),
        build(decode, (data, rows.view(formula.decoded))),
        blocks,
    )


def same_bytes(usual: BlockCodec, other: Codec) -> bool:
    """Whether two codecs agree on a chunk that has what is difficult: ties, zeros, and numbers at the ends of the range."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_COMPARED, generator=generator)
    blocks = values.view(-1, 2 * usual.block)
    kinds = blocks.shape[0] // 4  # of each kind; the others stay as they are
    # Multiples of an eighth, times a power of two that differs from block to block.
    ties = torch.randint(-64, 65, (kinds, 2 * usual.block), generator=generator).float() / 8
    exponents = torch.linspace(-149, 124, kinds).round().view(-1, 1)
    blocks[:kinds] = ties.double().mul(torch.exp2(exponents.double())).clamp(-3.4e38, 3.4e38)
    # Any bits that are a number.
    bits = torch.randint(-(2**31), 2**31, (kinds, 2 * usual.block), generator=generator)
    numbers = bits.to(torch.int32).view(torch.float32)
    blocks[kinds : 2 * kinds] = torch.where(numbers.isfinite(), numbers, -0.0)
    # As near as can be to the middle between two steps of int8, where a division that is not exact shows.
    steps = torch.randint(-127, 127, (kinds, 2 * usual.block), generator=generator) + 0.5
    largest = torch.rand(kinds, 1, generator=generator) + 1.0
    blocks[2 * kinds : 3 * kinds] = steps * (largest / 127)
    blocks[2 * kinds : 3 * kinds, :: usual.block] = largest
    blocks[-2] = 0.0
    blocks[-1] = torch.finfo(torch.float32).max
    data = usual.encode(values)
    wanted, found = torch.empty_like(values), torch.empty_like(values)
    usual.decode(data, wanted)
    other.decode(data, found)
    return torch.equal(other.encode(values), data) and torch.equal(
        found.view(torch.int32), wanted.view(torch.int32)
    )
