"""Whatever JSON can carry, and whatever a status can hold."""

from hypothesis import strategies as st

from diloco_protocol import Reason, ReplicaState, ReplicaStatus
from diloco_protocol._fields import LARGEST, LATEST

text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)

odd_values = st.one_of(
    st.text(max_size=20),
    st.floats(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.lists(st.none(), max_size=2),
    st.dictionaries(text, st.integers(), max_size=1),
    st.sampled_from([10**4000, -(10**4000), "\ud800", "\0", "9" * 5000]),
)
"""What a stranger may write into a field of a record."""

statuses = st.builds(
    ReplicaStatus,
    state=st.sampled_from(ReplicaState),
    attempt=st.integers(1, LARGEST),
    reason=st.none() | st.sampled_from(Reason),
    stopping=st.booleans(),
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.sampled_from(["SIGKILL", "signal 64"]),
    message=text,
    started_at=st.none() | st.floats(0, LATEST),
    finished_at=st.none() | st.floats(0, LATEST),
    url=st.none() | text,
    native=text,
)
