"""Test what every codec has to do: those of ours, and those of others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from .._codecs._codec import Codec

_SMALLEST = 2.0**-149
_LARGEST = torch.finfo(torch.float32).max
_ALIGNMENT = 16


class CodecConformance:
    """Tests of a codec, for pytest or any other runner that calls methods named ``test_...``.

    Derive a class, and return the codec from :meth:`make`. If the codec states how far a decoded
    value may be from the original, return that from :meth:`error`, and it is tested, too::

        class TestMyCodec(CodecConformance):
            def make(self):
                return MyCodec()
    """

    def make(self) -> Codec:
        """The codec."""
        raise NotImplementedError("return the codec from make()")

    def error(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return the largest difference between each decoded value and its original.

        Return None if nothing is stated about it.

        Args:
            values: All values of one block, or some of them; float64, finite in float32.
        """
        del values
        return None  # mypy wants it said

    def test_its_members_are_what_exchanges_expect(self) -> None:
        """A name, whether it is plain, and the size of a block."""
        codec = self.make()
        assert isinstance(codec.name, str)
        assert codec.name
        assert isinstance(codec.plain, bool)
        assert isinstance(codec.block, int)
        assert codec.block >= 1
        assert isinstance(getattr(codec, "sparse", False), bool)

    def test_encoded_values_have_the_size_that_it_says(self) -> None:
        """So that a listing shows whether an object is complete."""
        codec = self.make()
        for values in _samples(codec):
            data = codec.encode(values)
            assert data.dtype is torch.uint8
            says = codec.size(values.dtype, values.numel())
            assert data.shape == (says,), (
                f"{codec.name}: encode() made {data.numel()} bytes of {values.numel()} values of "
                f"{values.dtype}, and size() says {says}"
            )
            assert data.is_contiguous()
            assert data.device.type == "cpu"
        assert codec.size(torch.float32, 0) == 0

    def test_the_bytes_are_the_same_however_a_shard_is_cut(self) -> None:
        """Replicas choose the sizes of their chunks themselves."""
        codec = self.make()
        unit = math.lcm(_ALIGNMENT, codec.block)
        for dtype in (torch.float32, torch.float64):
            values = _random(3 * unit + 7, dtype)
            whole = bytes(codec.encode(values).tolist())
            for step in (unit, 2 * unit):
                chunks = [codec.encode(chunk) for chunk in torch.split(values, step)]
                assert b"".join(bytes(chunk.tolist()) for chunk in chunks) == whole, (
                    f"{codec.name}: what encode() makes of {len(values)} values is not what it "
                    f"makes of them cut after every {step} values, one piece after the other. Each "
                    f"block of {codec.block} values has to be encoded by itself, with all that it "
                    "needs, such as its scale, beside it"
                )
                sizes = [codec.size(dtype, len(chunk)) for chunk in torch.split(values, step)]
                assert sum(sizes) == len(whole), (
                    f"{codec.name}: size() says {sizes} for the pieces of {len(values)} values, "
                    f"and {len(whole)} for all of them"
                )
                out = torch.full_like(values, torch.nan)
                for chunk, part in zip(chunks, torch.split(out, step), strict=True):
                    codec.decode(chunk, part)
                assert torch.equal(out, _decoded(codec, values))

    def test_encoding_again_gives_the_same_bytes(self) -> None:
        """A contribution may be sent twice."""
        codec = self.make()
        for values in _samples(codec):
            assert torch.equal(codec.encode(values), codec.encode(values.clone()))

    def test_values_are_not_changed(self) -> None:
        """They may be the model's own."""
        codec = self.make()
        for values in _samples(codec):
            before = values.clone()
            data = codec.encode(values)
            kept = data.clone()
            codec.decode(data, torch.empty_like(values))
            assert torch.equal(values, before)
            assert torch.equal(data, kept)

    def test_all_values_are_filled_in(self) -> None:
        """Whatever was in the memory before."""
        codec = self.make()
        for values in _samples(codec):
            data = codec.encode(values)
            outs = [torch.full_like(values, filler) for filler in (torch.nan, 1.0)]
            for out in outs:
                codec.decode(data, out)
            assert torch.equal(*outs)

    def test_finite_values_stay_finite(self) -> None:
        """The largest and the smallest numbers, equal ones, and any mixture."""
        codec = self.make()
        for values in _samples(codec):
            assert _decoded(codec, values).isfinite().all(), f"{codec.name} of {values}"

    def test_zeros_stay_zeros(self) -> None:
        """A replica that has learned nothing must not move the model."""
        codec = self.make()
        for numel in _lengths(codec):
            for zero in (0.0, -0.0):
                assert not _decoded(codec, torch.full((numel,), zero)).any()

    def test_threads_do_not_disturb_each_other(self) -> None:
        """Shards are encoded and decoded by several threads."""
        codec = self.make()
        inputs = [_random(2 * codec.block + number, torch.float32, number) for number in range(8)]
        wanted = [_decoded(codec, values) for values in inputs]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                found = pool.map(lambda values: _decoded(codec, values), inputs)
                assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))

    def test_a_plain_codec_changes_nothing(self) -> None:
        """Exchanges skip it."""
        codec = self.make()
        if codec.plain:
            for values in _samples(codec):
                assert torch.equal(codec.encode(values), values.view(torch.uint8))
                assert torch.equal(_decoded(codec, values), values)

    def test_decoded_values_are_as_near_as_it_states(self) -> None:
        """For each block by itself."""
        codec = self.make()
        for values in _samples(codec):
            for block, decoded in zip(
                torch.split(values, codec.block),
                torch.split(_decoded(codec, values), codec.block),
                strict=True,
            ):
                original = block.double()
                stated = self.error(original)
                if stated is None:
                    return
                off = (decoded.double() - original).abs()
                assert bool((off <= stated).all()), f"{codec.name} of {block}"


def _decoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, torch.nan)
    codec.decode(codec.encode(values), out)
    return out


def _lengths(codec: Codec) -> list[int]:
    block = codec.block
    return sorted({1, 2, 3, 17, max(1, block - 1), block, block + 1, 2 * block + 5})


def _random(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def _samples(codec: Codec) -> Iterator[torch.Tensor]:
    for numel in _lengths(codec):
        for dtype in (torch.float32, torch.float64):
            values = _random(numel, dtype, numel)
            yield values
            yield values * 1e-30
            yield values * values.exp().pow(8)  # some numbers much larger than others
            yield torch.full((numel,), 0.1, dtype=dtype)
            yield torch.full((numel,), _LARGEST, dtype=dtype)
            yield torch.full((numel,), _SMALLEST, dtype=dtype)
            mixed = torch.tensor([_LARGEST, -_LARGEST, _SMALLEST, 0.0, 1.0, -1e-20], dtype=dtype)
            yield mixed.repeat(-(-numel // len(mixed)))[:numel].clone()
