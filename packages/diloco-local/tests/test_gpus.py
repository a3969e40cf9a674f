import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_local import LocalProcessExecutor, _gpus
from diloco_local._gpus import Gpu, ask_nvidia_smi, available_gpus, parse_nvidia_smi, share_out
from diloco_protocol import InvalidRequestError

LISTING = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5a2c9a36-a1ae-4b33-9cbf-5a4b0d6a8c11)
GPU 1: NVIDIA H200 (UUID: GPU-0b2c9a36-a1ae-4b33-9cbf-5a4b0d6a8c22)
"""
SLICES = """\
  MIG 1g.10gb     Device  0: (UUID: MIG-c1a9ac8e)
  MIG 3g.40gb Device 1: (UUID: MIG-d1)
"""
SLICED = LISTING.replace("GPU 1", f"{SLICES}GPU 1")


def test_a_model_is_found_by_part_of_its_name_and_shared_out():
    listing = [
        Gpu("0", "NVIDIA GeForce RTX 4090"),
        Gpu("1", "NVIDIA A100"),
        Gpu("2", "NVIDIA A100"),
    ]
    assert share_out("a100:2", 1, lambda: listing) == ["1,2"]
    assert share_out("RTX 4090", 1, lambda: listing) == ["0"]
    assert share_out("ANY:3", 1, lambda: listing) == ["0,1,2"]


@pytest.mark.parametrize("text", ["", "0", "A100:0", "A100:", ":2", "A100:x", "any:-1"])
def test_bad_requests(text):
    with pytest.raises(InvalidRequestError, match="is not a request for GPUs"):
        share_out(text, 1, list)


def test_listing():
    assert parse_nvidia_smi(LISTING) == [Gpu("0", "NVIDIA A100-SXM4-80GB"), Gpu("1", "NVIDIA H200")]
    assert parse_nvidia_smi("No devices found\n") == []


def test_a_gpu_that_is_cut_is_listed_by_its_slices():
    """CUDA would show the first of them as the GPU."""
    whole, first, second, last = parse_nvidia_smi("GPU 7: NVIDIA T4\n" + SLICED)
    assert (whole, last) == (Gpu("7", "NVIDIA T4"), Gpu("1", "NVIDIA H200"))
    assert (first, second) == (Gpu("MIG-c1a9ac8e", "MIG 1g.10gb"), Gpu("MIG-d1", "MIG 3g.40gb"))
    with pytest.raises(InvalidRequestError, match="offers 0 of them"):
        share_out("A100", 1, lambda: parse_nvidia_smi(SLICED))
    assert share_out("MIG 3g.40gb", 1, lambda: parse_nvidia_smi(SLICED)) == ["MIG-d1"]


def test_where_the_gpus_come_from():
    def ask():
        return parse_nvidia_smi(LISTING)

    assert available_gpus(["1", "7"], {}, ask) == [Gpu("1", "NVIDIA H200"), Gpu("7")]
    assert available_gpus(None, {"CUDA_VISIBLE_DEVICES": "1, 07"}, ask) == [
        Gpu("1", "NVIDIA H200"),
        Gpu("7"),
    ]
    assert available_gpus(None, {"CUDA_VISIBLE_DEVICES": "GPU-x,GPU-y"}, ask)[1:] == [Gpu("GPU-y")]
    assert available_gpus(None, {"CUDA_VISIBLE_DEVICES": ""}, ask) == []
    assert available_gpus(None, {"CUDA_VISIBLE_DEVICES": "-1"}, ask) == []
    assert available_gpus(None, {"CUDA_VISIBLE_DEVICES": "0, -1, 1"}, ask)[1:] == []
    assert [gpu.device for gpu in available_gpus(None, {}, ask)] == ["0", "1"]


@pytest.mark.parametrize(
    "visible",
    [
        "0,0",
        "0,1,0",
        "0,00",
        "0, 0",
        "GPU-1,GPU-1",
        "MIG-1,MIG-1",
        "GPU-12,GPU-2,GPU-1",
    ],
)
def test_a_gpu_that_is_named_twice_is_refused(visible):
    """Two replicas would share it."""
    with pytest.raises(InvalidRequestError, match=r"^CUDA_VISIBLE_DEVICES=.* names a GPU twice"):
        available_gpus(None, {"CUDA_VISIBLE_DEVICES": visible}, list)
    with pytest.raises(InvalidRequestError, match=r"^gpus=.* names a GPU twice"):
        LocalProcessExecutor(gpus=visible.split(","))


@pytest.mark.parametrize(
    "devices",
    [
        ["0,1", "1"],
        ["foo"],
        ["0", "1;2"],
        ["-1"],
        ["0", "GPU-1"],
        ["\0"],
        ["MIG-GPU-1"],
        ["MIG-GPU-1/2/0"],
        ["MIG-1/2/0"],
        ["GPU-1/2/0"],
    ],
)
def test_what_may_be_no_gpu_of_its_own_is_refused(devices):
    with pytest.raises(InvalidRequestError, match="must name GPUs by their numbers"):
        LocalProcessExecutor(gpus=devices)


def test_slices_of_gpus():
    devices = ["MIG-c1a9ac8e", "MIG-d1a9ac8e"]
    found = available_gpus(None, {"CUDA_VISIBLE_DEVICES": ",".join(devices)}, list)
    assert found == [Gpu(device) for device in devices]
    assert LocalProcessExecutor(gpus=devices)._options.gpus == tuple(devices)
    assert share_out("any:1", 2, lambda: found) == devices
    with pytest.raises(InvalidRequestError, match=f"one slice .*{devices[0]}: ask for one"):
        share_out("any:2", 1, lambda: found)


def test_gpus_are_named_once(tmp_path):
    executor = LocalProcessExecutor(root=tmp_path, gpus=["0"])
    plan = {"entrypoint": "a:b", "env": {"CUDA_VISIBLE_DEVICES": "1"}}
    assert executor.plan(1, **plan).requests[0]["env"]["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(InvalidRequestError, match=r"='1' in env has no effect beside gpus=\['0'\]"):
        executor.plan(1, gpu="1", **plan)


@pytest.mark.parametrize("visible", ["0,foo,1", "0,,1", "0, -1,1"])
def test_from_what_names_no_gpu_on_nothing_is_visible(visible):
    """To CUDA, and so to replicas."""
    found = available_gpus(None, {"CUDA_VISIBLE_DEVICES": visible}, list)
    assert found == [Gpu("0")]


def test_no_program_of_the_current_folder_is_started(tmp_path, monkeypatch):
    """An empty entry of PATH means that folder to a shell, and anyone's programs may be there."""
    for name in ("nvidia-smi", "python3"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n: > started; echo 'GPU 0: theirs'\n")
        program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for path in ("", ":", ".", f".:{tmp_path / 'none'}:"):
        monkeypatch.setenv("PATH", path)
        assert ask_nvidia_smi() == []
        with pytest.raises(InvalidRequestError, match="is not an interpreter"):
            LocalProcessExecutor(root=tmp_path / "root", python="python3").plan(1, "t:t")
    assert not (tmp_path / "started").exists()
    monkeypatch.setenv("PATH", f":{tmp_path}")
    assert ask_nvidia_smi() == [Gpu("0", "theirs")]


@given(n=st.integers(1, 5), count=st.integers(1, 4), spare=st.integers(0, 3))
def test_shares_are_disjoint_and_complete(n, count, spare):
    gpus = [Gpu(str(k)) for k in range(n * count + spare)]
    shares = share_out(f"any:{count}", n, lambda: gpus)
    devices = [device for share in shares for device in share.split(",")]
    assert len(shares) == n
    assert all(len(share.split(",")) == count for share in shares)
    assert len(set(devices)) == len(devices)


@given(n=st.integers(1, 5), count=st.integers(1, 4), missing=st.integers(1, 20))
def test_too_few_is_an_error(n, count, missing):
    gpus = [Gpu(str(k)) for k in range(max(0, n * count - missing))]
    with pytest.raises(InvalidRequestError, match="this machine offers"):
        share_out(str(count), n, lambda: gpus)


def test_an_unknown_model_is_an_error_that_lists_the_known():
    with pytest.raises(InvalidRequestError, match="NVIDIA H200"):
        share_out("GB300", 1, lambda: parse_nvidia_smi(LISTING))
    assert share_out("h200", 1, lambda: parse_nvidia_smi(LISTING)) == ["1"]


def test_none_asks_nobody():
    def ask():
        raise AssertionError("nobody wanted GPUs")

    assert share_out(None, 3, ask) == [None] * 3


@pytest.mark.parametrize("where", ["launcher", "constructor", "launch"])
def test_the_gpus_that_the_user_names_in_the_environment_are_shared_out(
    tmp_path, monkeypatch, where
):
    chosen = {"CUDA_VISIBLE_DEVICES": "5,7"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7" if where == "launcher" else "0,1")
    env = {"constructor": chosen}.get(where)
    executor = LocalProcessExecutor(root=tmp_path, env=env)
    plan = executor.plan(2, "a:b", {}, gpu="1", env={"launch": chosen}.get(where))
    assert [each["env"]["CUDA_VISIBLE_DEVICES"] for each in plan.requests] == ["5", "7"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("#!/bin/sh\nexec sleep 600\n", []),
        ("#!/no/such/interpreter\n", []),
        ("\x7fELF garbage", []),
        ("#!/bin/sh\nprintf 'GPU 0: A\\377 (UUID: GPU-1)\\n'\n", [Gpu("0", "A\ufffd")]),
    ],
)
def test_a_program_that_does_not_answer_as_it_should(tmp_path, monkeypatch, program, found):
    file = tmp_path / "nvidia-smi"
    file.write_text(program)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(_gpus, "_PATIENCE", 1.0)
    assert ask_nvidia_smi() == found
