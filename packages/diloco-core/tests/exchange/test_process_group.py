"""The exchange over a process group, between real processes over gloo: bit for bit what the other
exchanges give.
"""

import datetime
import hashlib

import pytest
import torch
from sync_lab import START, Halved, Replica, rounded
from training_lab import PATIENCE
from warm_processes import WarmProcess

from diloco_core import ConfigurationError, DiLoCo, ProcessGroupExchange, SyncError, in_process

pytestmark = pytest.mark.processes


class Model(torch.nn.Module):
    """fp32, bf16 and float64 parameters, and buffers of two more dtypes."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(7, 5)
        self.b = torch.nn.Linear(5, 3, dtype=torch.bfloat16)
        self.c = torch.nn.Parameter(torch.zeros(33, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))


def replica(
    exchange, *, raise_at=None, nan_at=None, huge=False, asks=False, steps=6, delay=0, **options
):
    model = Model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) + exchange.rank)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options |= {"sync_every": 4 if delay else 2, "fragments": 2, "delay": delay}
    if asks:
        options["outer_lr"] = lambda sync: (0.5 + exchange.rank) / sync
    with DiLoCo(model, inner, exchange, alpha=delay / 2, **options) as outer:
        for step in range(steps):
            if asks and step in {2, 3}:
                outer.set_outer_lr((1 + exchange.rank) / 8)
            if step == raise_at:
                raise ValueError("no more data")
            gradients = torch.Generator().manual_seed(1000 * exchange.rank + step)
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=gradients, dtype=torch.float64)
                factor = float("nan") if step == nan_at else 0.1
                parameter.grad = gradient.mul(factor).to(parameter.dtype)
            if huge and step == 3:
                model.b.bias.grad[2] = 3e38
            if options.get("weight") == "tokens":
                outer.count_tokens(1 + 3 * exchange.rank + step)
            inner.step()
    return model


#: The options of :func:`replica` in runs that end as those between threads do.
SAME = {
    "equal": {},
    "weighed": {"weight": "tokens"},
    "clipped": {"clip": "median"},
    "delayed": {"delay": 1},
    # Each replica has a function of its own, and both ask for another rate at the same time.
    "asks": {"delay": 1, "asks": True},
}
#: What rank 1 does wrong.
WRONG = {
    "fails": {"raise_at": 2},
    "delayed fails": {"raise_at": 2, "delay": 1},
    "nan": {"nan_at": 2},
    "unequal": {"steps": 2},
    "skips": {"steps": 5},
}


def digest(model):
    whole = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole.update(name.encode() + bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return whole.hexdigest()


def take_part(meet, rank, n, how):
    """Do the work of one of the processes."""
    torch.set_num_threads(1)
    group, patience = torch.distributed, datetime.timedelta(seconds=PATIENCE)
    group.init_process_group("gloo", init_method=meet, rank=rank, world_size=n, timeout=patience)
    try:
        options = {"huge": True} if how == "overflows" else SAME.get(how, {})
        if how in WRONG:
            options = WRONG[how] if rank else {"delay": WRONG[how].get("delay", 0)}
        model = replica(ProcessGroupExchange(chunk_bytes=64), **options)
        print("digest", digest(model))  # noqa: T201 - the parent process reads it
    except Exception as error:
        print("error", type(error).__name__, error)  # noqa: T201 - the parent process reads it
    if how == "equal":
        group.destroy_process_group()


def start(tmp_path, n, how):
    meet = f"file://{tmp_path}/meet"
    processes = [WarmProcess(tmp_path / f"{r}", take_part, meet, r, n, how) for r in range(n)]
    said = []
    for process in processes:
        status, out, err = process.communicate()
        assert status == 0, err
        said.append(out.strip())
    return said


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("how", "n"), [("equal", 1), ("equal", 3), *((how, 2) for how in SAME if how != "equal")]
)
def test_the_same_bytes_as_between_threads(how, n, tmp_path, lab):
    models = lab.run(lambda exchange: replica(exchange, **SAME[how]), in_process(n))
    plain = lab.run(replica, in_process(n))
    assert len({digest(model) for model in models}) == 1
    assert (digest(models[0]) == digest(plain[0])) is (how == "equal")
    assert start(tmp_path, n, how) == [f"digest {digest(models[0])}"] * n


@pytest.mark.parametrize("how", ["fails", "delayed fails"])
def test_a_replica_that_fails_is_named(tmp_path, how):
    """With a delay, it fails after two steps, one before the first sync is adopted by anybody."""
    first, second = start(tmp_path, 2, how)
    assert second == "error ValueError no more data"
    assert first.startswith("error ReplicaLostError rank 1 failed after ")
    assert first.endswith("ValueError: no more data")


def test_what_would_overflow_is_refused_by_all(tmp_path):
    """Its owner alone has computed it; the others wait in a collective meanwhile."""
    for text in start(tmp_path, 3, "overflows"):
        assert text.startswith("error NonFiniteUpdateError in sync ")
        assert "outer learning rate 0.7) makes tensor 'b.bias' NaN or infinite in bfloat16" in text


def test_a_contribution_that_is_refused_is_told_to_the_others(tmp_path):
    first, second = start(tmp_path, 2, "nan")
    assert second.startswith("error NonFiniteDeltaError the contribution of rank 1 is not finite")
    assert first.startswith("error ReplicaLostError rank 1 failed after 2 syncs: NonFinite")


def test_unequal_numbers_of_syncs_are_no_hang(tmp_path):
    first, _ = start(tmp_path, 2, "unequal")
    text = "rank 1 has left the run after 3 syncs, so this replica (rank 0) cannot take sync 4"
    assert first.startswith(f"error UnequalSyncsError {text}")


def test_a_replica_that_has_skipped_a_step(tmp_path):
    """The other one drops the end that nobody is left for."""
    first, second = start(tmp_path, 2, "skips")
    assert first.startswith("digest ")
    assert first == second


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    meet = f"file://{tmp_path}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield ProcessGroupExchange()
    torch.distributed.destroy_process_group()


def test_nobody_leaves_with_a_sync_under_way(alone):
    replica = Replica(alone)
    replica.learn()
    pending = alone.begin(replica.job)
    with pytest.raises(SyncError, match="cannot leave: the sync of 0 has been begun and not"):
        alone.leave()
    assert pending.finish().committed
    alone.leave()


def test_its_own_contribution_goes_through_the_codec_too(alone):
    replica = Replica(alone, Halved())
    replica.learn()
    with torch.no_grad():
        replica.parameter += 0.001
        delta = START - replica.parameter
    assert alone.sync(replica.job).committed
    sent = rounded(delta)
    assert not torch.equal(sent, delta), "the codec loses something"
    assert torch.equal(replica.job.copy[0], START - 0.5 * sent)


def test_without_a_process_group_it_says_what_to_do():
    with pytest.raises(ConfigurationError, match="init_process_group"):
        ProcessGroupExchange()
