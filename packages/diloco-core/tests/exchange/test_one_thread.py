"""A sync calculates in one thread, whatever the training has; nobody else's number changes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sync_lab import Halved
from torch.utils._python_dispatch import TorchDispatchMode

from diloco_core import DiLoCo, connect
from diloco_core._exchange._one_thread import one_thread
from diloco_core.testing import run_replicas


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Counting(Halved):
    """A codec that remembers how many threads torch would have used."""

    def __init__(self):
        self.encoding, self.decoding = set(), set()

    def encode(self, values):
        self.encoding.add(torch.get_num_threads())
        return super().encode(values)

    def decode(self, data, out):
        self.decoding.add(torch.get_num_threads())
        super().decode(data, out)


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"delay": 1}], ids=["at once", "delay"])
@pytest.mark.parametrize("members", [{}, {"min_replicas": 2}], ids=["all ranks", "elastic"])
def test_values_are_encoded_and_decoded_in_one_thread(tmp_path, members, options):
    def train(exchange):
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, exchange, sync_every=2, codec=codec, **options):
            for _ in range(6):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5)
                optimizer.step()
            assert torch.get_num_threads() == 3

    codec = Counting()
    exchanges = [connect(tmp_path, rank=rank, world_size=2, **members) for rank in range(2)]
    assert run_replicas(train, exchanges) == [None, None]
    assert codec.encoding == codec.decoding == {1}


class Operations(TorchDispatchMode):
    """The names of the operations on floating-point tensors, each with the number of threads."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add((func.overloadpacket.__name__, torch.get_num_threads()))
        return func(*args, **(kwargs or {}))


def test_nothing_in_a_sync_goes_to_the_library_for_linear_algebra(tmp_path):
    """It has threads of its own, whose number is one for the whole process."""
    model, operations = torch.nn.Linear(8, 8), Operations()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = connect(tmp_path, rank=0, world_size=1)
    with DiLoCo(model, optimizer, exchange, sync_every=1):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        with operations:
            optimizer.step()
    names = {name for name, threads in operations.seen if threads == 1}
    assert "linalg_vector_norm" in names  # it has looked at the sync
    assert not names & {"dot", "vdot", "mm", "mv", "addmm", "addmv", "bmm"}


def test_the_number_comes_back_after_an_error():
    numbers = []

    def fail():
        with one_thread():
            numbers.append(torch.get_num_threads())
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert [*numbers, torch.get_num_threads()] == [1, 3]


def test_other_threads_keep_theirs():
    """Both those that have calculated before, and those that begin to while a sync goes on."""
    with ThreadPoolExecutor(1) as earlier:
        assert earlier.submit(torch.get_num_threads).result() == 3
        with one_thread():
            assert earlier.submit(torch.get_num_threads).result() == 3
            numbers = []
            later = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
            later.start()
            later.join()
            assert numbers == [3]


def test_a_thread_that_has_not_calculated_yet():
    """Torch sets the number of a thread at its first use, which must not undo ours."""
    numbers = []

    def act():
        with one_thread():
            numbers.append(torch.get_num_threads())
        numbers.append(torch.get_num_threads())

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert numbers == [1, 3]
