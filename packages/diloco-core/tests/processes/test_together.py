"""Several processes that are one replica train as one process would."""

from itertools import product
from math import sqrt

import pytest
import torch
from safetensors.torch import load_file

from .several import trained

PLAIN = [("plain", 1), ("plain", 1)]
DELAYED = {"options": {"delay": 1, "fragments": ("strided", 3)}}
MIXED = {"sgd": True, "options": {"delay": 2, "alpha": 0.5}, "connect": {"min_replicas": 2}}
UNLIKE = (
    "ConfigurationError: the processes of this replica do not have the same model and settings: "
)
APART = "SyncError: the processes of this replica do different things (process 0: "
ELASTIC = {"connect": {"min_replicas": 2}, "options": {"weight": "tokens"}, "evaluate": True}


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    ("replicas", "case"),
    [
        ([("ddp", 2), ("ddp", 2)], {"rate": [3, 1, 0.5, 0.3, 0.5]}),
        ([("fsdp", 2), ("fsdp", 2)], DELAYED),
        ([("ddp", 2), ("ddp", 2)], MIXED),
        ([("parts", 2), ("ddp", 2)], {"groups": True}),
        ([("ddp", 2), ("ddp", 2)], {"one_world": True}),
        ([("fsdp", 2), ("plain", 1)], ELASTIC),
        ([("ddp", 2), ("fsdp", 2)], {"alternates": True}),
        ([("hybrid", 4), ("tensor", 4)], {}),
    ],
    ids=[
        "ddp",
        "delayed fragments",
        "mixed",
        "groups of parameters",
        "one group of torch",
        "elastic",
        "alternating optimizers",
        "hybrid and tensor parallel",
    ],
)
def test_they_end_where_plain_replicas_end(tmp_path, replicas, case):
    plain = {**case, "one_world": False, "rate": [3, 0, 0.5] if "rate" in case else None}
    check_alike(trained(tmp_path, "alone", PLAIN, plain), tmp_path, replicas, case)


CASES = product(
    {"adamw": {}, "momentum": {"sgd": True, "inner": {"momentum": 0.9}}}.items(),
    {"fixed": {}, "elastic": {"min_replicas": 2}}.items(),
    {"at once": 0, "delayed": 2}.items(),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(name for name, _ in case))
def plain(request, tmp_path_factory):
    """A case, and how replicas of one process end in it."""
    (_, inner), (_, settings), (_, delay) = request.param
    case = {**inner, "connect": settings, "options": {"delay": delay}}
    return case, trained(tmp_path_factory.mktemp("plain"), "alone", PLAIN, case)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "processes"), [("ddp", 2), ("fsdp", 2), ("hybrid", 4), ("tensor", 4)]
)
def test_whatever_holds_them_together_they_end_there(tmp_path, plain, kind, processes):
    case, alone = plain
    check_alike(alone, tmp_path, [(kind, processes)] * 2, case)


def check_alike(alone, folder, replicas, case):
    """Check that replicas of several processes end where two of one process have ended."""
    several = trained(folder, "several", replicas, case)
    (expected, told), (other, _) = alone
    assert all(torch.equal(expected[name], other[name]) for name in expected)
    first = several[0][0]
    same = ("committed", "reports", "rates", "seen")
    for values, outcome in several:
        assert all(torch.equal(first[name], values[name]) for name in first), "bit for bit"
        assert [outcome[key] for key in same] == [told[key] for key in same]
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-12)
    places = [outcome["place"] for _, outcome in several]
    assert places == [
        [rank, 2, process, processes]
        for rank, (_, processes) in enumerate(replicas)
        for process in range(processes)
    ]


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("how", ["tied", "checkpointed", "compiled", "meta", "bf16", "offload"])
def test_a_sharded_model_may_be_as_people_have_it(tmp_path, how):
    (expected, _), _ = trained(tmp_path, "alone", PLAIN, {"how": how})
    (first, told), *others = trained(tmp_path, "run", [("plain", 1), ("fsdp", 2)], {"how": how})
    for values, outcome in others:
        assert all(torch.equal(first[name], values[name]) for name in first), "bit for bit"
        assert outcome["committed"] == told["committed"] == 4
    near = 0.1 if how == "bf16" else 1e-12
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=near)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_process_0_has_copies_of_the_committed_values(tmp_path, kind):
    """Of the middle of a period, and right after a sync; the replicas train as without them."""
    case = {"global_at": [0, 8, 12, 15]}
    alone = trained(tmp_path, "alone", PLAIN, case)
    unseen, *_ = trained(tmp_path, "unseen", [(kind, 2)] * 2, {})
    several = trained(tmp_path, "several", [(kind, 2)] * 2, case)
    assert all(torch.equal(unseen[0][name], several[0][0][name]) for name in unseen[0])
    shown = [outcome["shown"] for _, outcome in several]
    assert shown[1] == shown[3] == [{}] * 4, "the others have none"
    assert shown[0] == shown[2], "equal on all replicas"
    assert len(shown[0]) == 4
    for state, expected in zip(shown[0], alone[0][1]["shown"], strict=True):
        assert state.keys() == expected.keys()
        for name, values in expected.items():
            copied = torch.tensor(state[name], dtype=torch.float64)
            expected_values = torch.tensor(values, dtype=torch.float64)
            torch.testing.assert_close(copied, expected_values, rtol=0, atol=1e-12)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", [None, "buffers"])
def test_all_processes_evaluate_the_committed_model(tmp_path, kind, how):
    case = {"evaluated_at": [0, 8, 12, 15], "how": how}
    unseen, *_ = trained(tmp_path, "unseen", [(kind, 2)] * 2, {"how": how})
    several = trained(tmp_path, "several", [(kind, 2)] * 2, case)
    assert [outcome["raised"] for _, outcome in several] == [None] * 4
    assert all(torch.equal(unseen[0][name], several[0][0][name]) for name in unseen[0])
    moved = how == "buffers"  # a forward pass right after a sync has changed the buffers
    for _, outcome in several:
        assert [shown["differ"] for shown in outcome["shown"]] == [moved, True, moved, True]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("by", "words"),
    [
        ("fsdp", "'layers.0.up.weight' is on processes outside this replica: mesh it over {0}"),
        (
            "ddp",
            "the model is in a DistributedDataParallel of processes {1}, and this replica is {0}: "
            "give it a process_group of exactly these",
        ),
    ],
)
def test_a_model_that_spans_replicas_is_refused(tmp_path, by, words):
    """Also DDP of as many processes as a replica has, one of each replica."""
    case = {"one_world": True, "spans": by}
    outcomes = trained(tmp_path, "run", [("plain", 2), ("plain", 2)], case)
    for (_, outcome), ranks in zip(outcomes, [[0, 1], [0, 1], [2, 3], [2, 3]], strict=True):
        problem = words.format(ranks, [0, 2])
        assert outcome["raised"] == f"ConfigurationError: process 0 of this replica: {problem}"
    assert not (tmp_path / "run" / "store" / "manifest.json").exists()


@pytest.mark.processes
def test_replicas_of_any_size_meet_in_one_run(tmp_path):
    case = {"steps": 18, "options": {"codec": "int8"}, "connect": {"min_replicas": 3}}
    (expected, _), *_ = trained(tmp_path, "alone", [("plain", 1)] * 3, case)
    sizes = [("fsdp", 4), ("ddp", 2), ("plain", 1)]
    (first, told), *others = trained(tmp_path, "several", sizes, case)
    for values, outcome in others:
        assert all(torch.equal(first[name], values[name]) for name in first), "bit for bit"
        assert outcome["reports"] == told["reports"]
    # A value that lies between two codes may be rounded to the other one.
    code = max(scales_of_codes(tmp_path / "alone" / "store"))
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=code)


def scales_of_codes(store):
    """Return by how much a value changes with its code, for each block of the last sync."""
    sent = [load_file(each) for each in store.glob("deltas/*/*.safetensors")]
    blocks = [each for file in sent for name, each in file.items() if not name.endswith("xxh3")]
    assert max(map(len, blocks)) == 4 + 256, "a scale, and the codes of one block"
    return [block[:4].view(torch.float32).item() for block in blocks]


@pytest.mark.processes
def test_synced_buffers_are_those_of_the_leaders_on_all_processes(tmp_path):
    """Each process of FSDP2 sees its own half of a batch, so its BatchNorm has its own values."""
    case, replicas, mean = {"how": "buffers"}, [("fsdp", 2), ("ddp", 2)], "layers.2.0.running_mean"
    (first, _), *others = trained(tmp_path, "run", replicas, case)
    for values, _ in others:
        assert all(torch.equal(first[name], values[name]) for name in first)
    case["options"] = {"buffers": "none"}
    leader, second, other, _ = (
        values[mean] for values, _ in trained(tmp_path, "unsynced", replicas, case)
    )
    assert not torch.allclose(leader, second)
    torch.testing.assert_close(first[mean], (leader + other) / 2, rtol=0, atol=1e-12)


@pytest.mark.processes
def test_a_rate_that_any_process_sets_holds_where_syncs_come_after_seconds(tmp_path):
    # The only sync comes where the block is left, long after the processes have met for steps.
    case = {"seconds": 1000, "rate": [3, 1, 0.5], "connect": {"min_replicas": 1}}
    (first, outcome), (second, other) = trained(tmp_path, "run", [("ddp", 2)], case)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert outcome["reports"] == other["reports"]
    assert outcome["rates"][-1] == other["rates"][-1] == 0.5


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "case", "words"),
    [
        ("ddp", {"nan_at": 4}, "NonFiniteDeltaError: "),
        ("ddp", {"unreadable": [5, 0]}, "RuntimeError: CUDA error"),
        ("fsdp", {"unreadable": [5, 1]}, "RuntimeError: CUDA error"),
        ("ddp", {"load_at": 4}, "ModelChangedError: values were loaded into the model"),
        ("fsdp", {"load_at": 4}, "ModelChangedError: values were loaded into the model"),
        ("fsdp", {"load_last": True}, "ModelChangedError: values were loaded into the model"),
        ("ddp", {"alone": 0}, f"{APART}global_model(), process 1: the end of the block)"),
        ("ddp", {"alone": 1}, f"{APART}the end of the block, process 1: global_model())"),
        ("plain", {"how": "meta"}, "ConfigurationError: process 0 of this replica: 'layers.0"),
        ("ddp", {"options_on": {1: {"sync_every": 12}}}, f"{UNLIKE}process 1: sync_every=12, pro"),
        ("ddp", {"options_on": {0: {"clip": "median"}}}, f"{UNLIKE}process 0: clip='median'. "),
        ("ddp", {"options_on": {1: {"outer_lr": sqrt}}}, f"{UNLIKE}process 1: outer_lr=a builtin_"),
        ("ddp", {"connect_on": {1: {"sync_timeout": 60.0}}}, f"{UNLIKE}process 1: sync_timeout=6"),
        (
            "ddp",
            {"subclass": True},
            "ConfigurationError: Mine is a subclass of DiLoCo, which",
        ),
        ("plain", {"destroy_at": 5}, "SyncError: torch's process groups were destroyed before the"),
        (
            "ddp",
            {"seconds_on": 1, "connect": {"min_replicas": 1}},
            f"{UNLIKE}process 1: sync_every=Seconds(",
        ),
        ("ddp", {"options": {"outer_lr": -1.0}}, "ConfigurationError: outer_lr"),
        (
            "ddp",
            {"options": {"stateful": {"x": None}}},
            "ConfigurationError: process 0 of this replica: stateful['x']",
        ),
        (
            "ddp",
            {"keeps_weights": True},
            "ModelChangedError: the inner optimizer KeepsWeights",
        ),
        ("fsdp", {"keeps_weights": True}, "ModelChangedError: the inner optimizer KeepsWeights"),
        ("fsdp", {"unreduced": True}, "ModelChangedError: module '' holds gradients that FSDP2"),
        ("plain", {"apart": True}, "SyncError: process 1 of this replica has trained its model to"),
        (
            "ddp",
            {"options": {"on_sync": 5}},
            "ConfigurationError: process 0 of this replica: on_sync must be a function",
        ),
        ("ddp", {"how": "views"}, "ConfigurationError: process 0 of this replica: 'module.layers"),
        ("fsdp", {"unfrozen_at": 4}, "ModelChangedError: parameter 'head.bias' was frozen when"),
        ("ddp", {"remade_at": 8}, "UnseenStepsError: parameter 'head.weight' is trained, but no"),
        ("plain", {"how": "stages"}, f"{UNLIKE}process 1: layers.1.up.weight float64[10, 7] train"),
        (
            "plain",
            {"how": "quantised"},
            "ConfigurationError: process 0 of this replica: 'layers.0.up.weight' is a Codes of tor",
        ),
        (
            "ddp",
            {"foreign": 1},
            "ConfigurationError: process 1 of this replica: inner optimizer 0 (AdamW) holds a tens",
        ),
    ],
    ids=[
        "nan",
        "leader",
        "process",
        "loads",
        "sharded loads",
        "loads at the end",
        "evaluated by the leader",
        "evaluated by another",
        "meta",
        "settings",
        "a setting of one",
        "a function of one",
        "connected otherwise",
        "subclass",
        "groups that are gone",
        "seconds",
        "argument",
        "stateful",
        "weights",
        "sharded weights",
        "gradients",
        "apart",
        "on_sync",
        "views",
        "unfrozen",
        "foreign steps",
        "pipeline",
        "quantised",
        "foreign parameter",
    ],
)
def test_an_error_is_the_same_on_all_of_them(tmp_path, kind, case, words):
    outcomes = trained(tmp_path, "failed", [(kind, 2)], case)
    raised = [outcome["raised"] for _, outcome in outcomes]
    assert raised[0] == raised[1]
    assert raised[0].startswith(words)
    if "unreadable" in case:
        assert [outcome["inner_steps"] for _, outcome in outcomes] == [6, 6]


@pytest.mark.processes
def test_a_process_that_leaves_before_the_others_is_told_so(tmp_path):
    case = {"seconds": 100.0, "leave": [3, 1], "connect": {"min_replicas": 1}}
    (_, first), (_, second) = trained(tmp_path, "run", [("plain", 2)], case)
    words = "the processes of this replica have taken different numbers of inner steps"
    assert second["raised"].startswith(f"SyncError: {words}")
    assert first["raised"].startswith(
        f"ProcessFailedError: process 1 of this replica has failed: SyncError: {words}"
    )


@pytest.mark.processes
def test_a_child_that_is_forked_in_the_block_may_leave_it(tmp_path):
    for _, text in trained(tmp_path, "run", [("ddp", 2)], {"fork": [4, 0]}):
        assert (text["raised"], text["committed"]) == (None, 4)


@pytest.mark.processes
def test_steps_outside_the_block_are_refused(tmp_path):
    for _, text in trained(tmp_path, "run", [("ddp", 2)], {"never_entered": True}):
        assert text["raised"].startswith("SyncError: 6 inner steps were taken since this outer")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"options": {"weight": "tokens"}, "signs": [2, -1]}, "n in count_tokens(n) must be"),
        ({"signs": [0, 0]}, "count_tokens() was called, but contributions are weighed by"),
        ({"rate": [0, 1, [0.5]]}, "the outer learning rate must be a finite number, not [0.5]"),
        ({"rate": [0, 1, -0.5]}, "the outer learning rate must be positive, not -0.5"),
    ],
    ids=["negative", "not by tokens", "no number", "rate"],
)
def test_a_number_that_is_not_allowed_is_refused_where_it_is_given(tmp_path, case, words):
    _, (_, outcome) = trained(tmp_path, "run", [("plain", 2)], case)
    assert outcome["raised"].startswith(f"ConfigurationError: {words}")
    assert outcome["inner_steps"] == 0
