"""The bytes of every codec, and what they decode to, are what they were: a run may be older than
the code that resumes it.
"""

import pytest
import torch
import xxhash

from diloco_core._codecs._named import CODECS

NUMEL = 2 * 65536 + 4096 + 700


def values():
    """Numbers of many sizes, exact on every machine, without two equal magnitudes that a codec
    would have to choose from.
    """
    index = torch.arange(1, NUMEL + 1)
    mixed = (index * 2654435761) % 2**23
    signs = 1 - 2 * (mixed >> 3 & 1)
    return (signs * mixed).float() * 2.0 ** -(index // 4096 % 7 + 20).float()


GOLDEN = {
    "plain": ("ad6f145ff9fd1058", "ad6f145ff9fd1058"),
    "fp32": ("ad6f145ff9fd1058", "ad6f145ff9fd1058"),
    "bf16": ("462a6efca06fbe52", "caf377e73422bb8e"),
    "fp16": ("65267047bab1d8de", "d5b33335990f9e3c"),
    "int8": ("6bf7818164f608ef", "b5128241da474b0b"),
    "e2m1": ("e9c34f9ea360666c", "cb1c4929849fdbd6"),
    "topk64": ("f9b8284cd3931e79", "ac67750d33e6f02d"),
    "topk128": ("2ed027db4576a603", "046b4ed594f37299"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_are_what_they_were(name):
    codec, given = CODECS[name], values()
    data, out = codec.encode(given), torch.empty(NUMEL)
    codec.decode(data, out)
    found = tuple(xxhash.xxh3_64_hexdigest(tensor.numpy()) for tensor in (data, out))
    assert found == GOLDEN[name]
