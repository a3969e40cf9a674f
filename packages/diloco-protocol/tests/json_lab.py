"""Whatever JSON can carry."""

from hypothesis import strategies as st

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
