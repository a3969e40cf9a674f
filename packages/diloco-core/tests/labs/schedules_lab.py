"""Draw what simulated runs of both memberships go through."""

from hypothesis import strategies as st
from simulated import KINDS, Fault, Schedule


def drawn_schedule(draw, ranks, seconds, most_faults):
    """Return a schedule of so many ranks (a strategy), with delays of up to so many seconds."""
    world_size = draw(ranks)
    fault = st.builds(
        Fault,
        rank=st.integers(0, world_size - 1),
        incarnation=st.integers(1, 2),
        operation=st.integers(1, 130),
        kind=st.sampled_from(KINDS),
        seconds=st.sampled_from(seconds),
    )
    start = st.sampled_from([0.0, 0.01, 1.0, 40.0])
    return Schedule(
        world_size,
        seed=draw(st.integers(0, 2**16)),
        starts=draw(st.lists(start, min_size=world_size, max_size=world_size)),
        faults=draw(st.lists(fault, max_size=most_faults)),
        restart_after=draw(st.sampled_from([0.1, 5.0, 90.0])),
        latency=draw(st.sampled_from([0.001, 0.05, 1.0])),
    )


def drawn_state(draw, *, encoded):
    """Return the sizes of tensors, and how their state is published; in a third, encoded."""
    state_codec, full_state_every = "plain", None
    if encoded and draw(st.integers(0, 2)) == 0:
        state_codec = draw(st.sampled_from(["int8", "e2m1", "bf16"]))
        full_state_every = draw(st.integers(1, 4))
    # Shards are cut between the blocks of codecs, so smaller fragments would have only one that is
    # not empty.
    blocks = [(300,), (70, 40)] if full_state_every else []
    sizes = draw(st.sampled_from([(40,), (40, 30), *blocks]))
    return {"sizes": sizes, "state_codec": state_codec, "full_state_every": full_state_every}
