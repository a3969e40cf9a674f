"""Codecs as compiled code: the same bytes, and the usual code wherever that cannot be had.

Compiling takes seconds, so most tests let Python run what would be compiled. ``TestTheCompiler`` compiles.
"""

import logging
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_core import ConfigurationError, DiLoCo, compile_codec, in_process
from diloco_core._codecs import _compiled, _named
from diloco_core._codecs._compiled import CompiledCodec, compiled, same_bytes
from diloco_core._codecs._formulas import FORMULAS
from diloco_core._codecs._named import CODECS, find_codec
from diloco_core.testing import CodecConformance, run_replicas

NAMES = list(FORMULAS)
BITS = st.integers(-(2**31), 2**31 - 1)


def not_compiled(function, examples):
    return function


def small(name, values=1024):
    """The codec as it would be compiled for so few values that tests have more of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compiled, "_VALUES", values)
        codec = compiled(CODECS[name], not_compiled)
    assert isinstance(codec, CompiledCodec)
    return codec


@pytest.mark.parametrize("name", NAMES)
class TestFormulas:
    @given(
        numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1),
        exponents=st.lists(st.integers(-60, 60), min_size=1),
    )
    def test_encode_as_the_codec_does(self, name, numbers, exponents):
        codec, formula = CODECS[name], FORMULAS[name]
        rows = torch.tensor(numbers).repeat(codec.block)[: codec.block].repeat(len(exponents), 1)
        rows = (rows.double() * 2.0 ** torch.tensor(exponents).view(-1, 1)).clamp(-3.4e38, 3.4e38)
        rows = rows.float()
        head, body, _ = formula.encode(rows)
        data = torch.cat((head.view(torch.uint8), body), 1)
        assert torch.equal(data.view(-1), codec.encode(rows.view(-1)))
        out = torch.empty(rows.numel())
        codec.decode(data.view(-1), out)
        assert torch.equal(formula.decode(data).view(torch.int32).view(-1), out.view(torch.int32))

    @given(data=st.data())
    def test_decode_all_bytes_as_the_codec_does(self, name, data):
        codec, formula = CODECS[name], FORMULAS[name]
        width = codec.row_bytes(codec.block)
        scale = data.draw(
            st.floats(0, 2.0**119, width=32) if name == "int8" else st.integers(0, 255)
        )
        head = torch.tensor([[scale]]).to(formula.head)
        seed = data.draw(st.integers(0, 2**31))
        body = torch.randint(
            0,
            256,
            (1, width - head.itemsize),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )
        out = torch.empty(codec.block)
        encoded = torch.cat((head.view(torch.uint8), body), 1)
        codec.decode(encoded.view(-1), out)
        found = formula.decode(encoded).view(torch.float32).view(-1)
        assert torch.equal(found.isnan(), out.isnan())
        assert torch.equal(
            found.nan_to_num(1).view(torch.int32), out.nan_to_num(1).view(torch.int32)
        )


class TestInt8(CodecConformance):
    def make(self):
        return small("int8")


class TestE2M1(CodecConformance):
    def make(self):
        return small("e2m1")


class TestE3M0(CodecConformance):
    def make(self):
        return small("e3m0")


@pytest.mark.parametrize("name", NAMES)
class TestBytes:
    @pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 3 * 1024, 3 * 1024 + 999])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_are_the_usual_ones_for_every_number_of_values(self, name, numel, dtype):
        usual, codec = CODECS[name], small(name)
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        data = codec.encode(values)
        assert torch.equal(data, usual.encode(values))
        wanted, found = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        usual.decode(data, wanted)
        codec.decode(data, found)
        assert torch.equal(found, wanted)

    @pytest.mark.parametrize("before", [1, 2, 3])
    def test_may_be_decoded_into_memory_that_begins_anywhere(self, name, before):
        usual, codec = CODECS[name], small(name)
        values = torch.randn(2048, generator=torch.Generator().manual_seed(0))
        data = usual.encode(values)
        wanted, found = torch.empty(2048), torch.zeros(before + 2048 + 1)
        usual.decode(data, wanted)
        codec.decode(data, found[before:-1])
        assert torch.equal(found[before:-1], wanted)
        assert not found[:before].any()
        assert not found[-1:].any()

    def test_whole_groups_of_blocks_go_through_the_compiled_code(self, name):
        counts = {"encode": [], "decode": []}

        def counting(function, examples):
            def counted(*arguments):
                counts[function.__name__].append(len(arguments[0]))
                return function(*arguments)

            return counted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_compiled, "_VALUES", 1024)
            codec = compiled(CODECS[name], counting)
        for calls in counts.values():
            calls.clear()
        values = torch.randn(3 * 1024 + 700)
        codec.decode(codec.encode(values), torch.empty_like(values))
        assert counts == {"encode": 3 * [1024 // codec.block], "decode": 3 * [1024 // codec.block]}

    def test_what_is_not_finite_stays_visible(self, name):
        codec = small(name)
        values = torch.randn(1024)
        values[700] = torch.nan
        out = torch.empty_like(values)
        codec.decode(codec.encode(values), out)
        block = slice(
            700 // codec.block * codec.block, 700 // codec.block * codec.block + codec.block
        )
        assert not out[block].isfinite().all()
        assert out[: block.start].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
class TestWhatCannotBeUsed:
    @pytest.mark.parametrize("what", ["encode", "decode"])
    @pytest.mark.parametrize("which", [0, 1000])
    def test_other_bytes(self, name, what, which, caplog):
        """One value, or one block, that is different."""

        def wrong(function, examples):
            def changed(*arguments):
                result = function(*arguments)
                if function.__name__ == what:
                    target = arguments[-1]
                    row = which % len(target)
                    target[row, 3] = target[row, 3] + 1
                return result

            return changed

        with caplog.at_level(logging.WARNING, "diloco_core"):
            assert compiled(CODECS[name], wrong) is CODECS[name]
        assert (
            f"the compiled code of codec {name!r} gives other bytes on this machine" in caplog.text
        )

    def test_no_compiler(self, name, caplog):
        def missing(function, examples):
            raise RuntimeError("no g++ found\nand much more")

        with caplog.at_level(logging.WARNING, "diloco_core"):
            assert compiled(CODECS[name], missing) is CODECS[name]
        (message,) = caplog.messages
        assert f"codec {name!r} could not be compiled (RuntimeError: no g++ found)." in message
        assert "needs a C++ compiler" in message

    def test_an_inexact_division(self, name):
        """What a compiler that reciprocals are good enough for would do."""

        def inexact(function, examples):
            def changed(*arguments):
                if function.__name__ == "encode":
                    arguments = (arguments[0] * (1 + 2**-23), *arguments[1:])
                return function(*arguments)

            return changed

        assert compiled(CODECS[name], inexact) is CODECS[name]


def as_fast(encode, decode):
    """A measurement: what compiled code takes, where the usual takes 2 seconds for each."""

    def seconds(codec, values):
        assert values.numel() == _compiled._VALUES
        return (encode, decode) if isinstance(codec, CompiledCodec) else (2.0, 2.0)

    return seconds


class TestSpeed:
    @pytest.mark.parametrize("encode", [1.0, 2.0])
    @pytest.mark.parametrize("decode", [1.0, 3.0])
    def test_compiled_code_is_used_for_what_it_makes_quicker(self, encode, decode, caplog):
        calls = []

        def counting(function, examples):
            def counted(*arguments):
                calls.append(function.__name__)
                return function(*arguments)

            return counted

        with caplog.at_level(logging.INFO, "diloco_core"):
            codec = compiled(CODECS["int8"], counting, as_fast(encode, decode))
        calls.clear()
        values, out = torch.randn(_compiled._VALUES), torch.empty(_compiled._VALUES)
        data = codec.encode(values)
        codec.decode(data, out)
        assert torch.equal(data, CODECS["int8"].encode(values))
        wanted = [name for name, each in (("encode", encode), ("decode", decode)) if each < 2.0]
        assert calls == wanted
        assert isinstance(codec, CompiledCodec) is bool(wanted)
        said = " and to ".join(wanted) or "do nothing: it is quicker without"
        assert caplog.messages[-1].endswith(f"uses compiled code to {said}")

    def test_it_is_measured(self):
        class Slow:
            def encode(self, values):
                time.sleep(0.002)
                return values.view(torch.uint8)

            def decode(self, data, out):
                time.sleep(0.001)

        encode, decode = _compiled.seconds(Slow(), torch.zeros(4))
        assert encode >= 0.002
        assert decode >= 0.001


class TestWhoAsksForIt:
    def test_gets_it_once_per_process(self, monkeypatch, caplog):
        functions = []
        monkeypatch.setattr(_named, "_made", {})
        monkeypatch.setattr(_named, "seconds", as_fast(encode=1.0, decode=1.0))
        monkeypatch.setattr(
            _named, "build", lambda function, examples: functions.append(function) or function
        )
        with caplog.at_level(logging.INFO, "diloco_core"), ThreadPoolExecutor(4) as pool:
            codecs = list(pool.map(compile_codec, 8 * ["int8"]))
        assert isinstance(codecs[0], CompiledCodec)
        assert all(codec is codecs[0] for codec in codecs)
        assert [function.__name__ for function in functions] == ["encode", "decode"]
        assert [m.split(" in ")[0] for m in caplog.messages] == ["codec 'int8' was compiled"]
        assert find_codec(codecs[0]) is codecs[0]

    @pytest.mark.parametrize("name", ["bf16", "plain", "int8-6sigma", "", None, 8, CODECS["int8"]])
    def test_for_another_codec_is_refused(self, name):
        with pytest.raises(
            ConfigurationError, match=r"only int8, e2m1, e3m0 can be compiled, not .*as they are"
        ):
            compile_codec(name)

    def test_may_meet_replicas_that_do_not(self):
        codecs = [small("e2m1"), "e2m1", small("e2m1", values=320)]

        def train(exchange):
            model = torch.nn.Linear(40, 9)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            data = torch.Generator().manual_seed(exchange.rank)
            options = {"sync_every": 2, "codec": codecs[exchange.rank]}
            with DiLoCo(model, inner, exchange, **options):
                for _ in range(4):
                    model(torch.randn(4, 40, generator=data)).square().mean().backward()
                    inner.step()
                    inner.zero_grad()
            return model.weight.detach()

        first, *others = run_replicas(train, in_process(3))
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, about parts of itself
class TestTheCompiler:
    @pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="needs g++")
    @pytest.mark.parametrize("name", NAMES)
    def test_gives_the_same_bytes_in_all_circumstances(self, name):
        usual = CODECS[name]
        codec = compiled(usual, _compiled.build)  # also what would not be quicker on this machine
        assert isinstance(codec, CompiledCodec), "see the log"
        assert same_bytes(usual, codec)

        def check(seed):
            numel = 2 * 2**18 + 1000 * seed
            values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
            data, wanted = codec.encode(values), torch.empty(numel)
            place = torch.empty(len(data) + seed, dtype=torch.uint8)
            place[seed:].copy_(data)
            found = torch.empty(numel + seed)[seed:]
            codec.decode(place[seed:], found)
            usual.decode(data, wanted)
            return torch.equal(data, usual.encode(values)) and torch.equal(found, wanted)

        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(check, range(6)))
        with torch.no_grad():
            assert check(1)
        with torch.inference_mode():
            assert check(2)

    @pytest.mark.processes
    def test_is_not_there(self, tmp_path):
        code = (
            "import logging, diloco_core; logging.basicConfig(level='WARNING'); "
            "print(type(diloco_core.compile_codec('int8')).__name__)"
        )
        environment = {
            **os.environ,
            "CXX": str(tmp_path / "none"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.stdout.strip() == "Int8"
        assert "codec 'int8' could not be compiled" in done.stderr
