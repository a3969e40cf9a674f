"""A handle is a value: immutable, hashable, the same after a journey through JSON."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import InvalidRequestError, ReplicaHandle, SpecVersionError

text = st.text(st.characters(exclude_categories=["Cs"]))
handles = st.builds(
    ReplicaHandle,
    st.integers(0, 99),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.dictionaries(text, text, max_size=4),
    run_id=text,
    world_size=st.integers(1, 200),
)


class TestHandle:
    @given(handles)
    def test_json(self, handle):
        again = ReplicaHandle.from_json(handle.to_json())
        assert again == handle
        assert hash(again) == hash(handle)
        assert again.metadata == handle.metadata

    def test_it_is_immutable(self):
        handle = ReplicaHandle(0, "b", {"job": "x"})
        with pytest.raises(AttributeError):
            handle.rank = 1
        with pytest.raises(TypeError):
            handle.metadata["job"] = "y"

    def test_positional_names_of_old(self):
        handle = ReplicaHandle(rank=2, backend_name="eks", metadata={"job_name": "j"})
        assert (handle.rank, handle.backend_name, handle.metadata["job_name"]) == (2, "eks", "j")
        assert ReplicaHandle(2, "eks").metadata == {}

    def test_handles_of_two_runs_differ(self):
        assert ReplicaHandle(0, "b", run_id="a") != ReplicaHandle(0, "b", run_id="c")

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ((-1, "b"), "rank"),
            (("0", "b"), "rank"),
            ((True, "b"), "rank"),
            ((0, ""), "backend_name"),
            ((0, "b", {"a": 1}), "text to text"),
            ((0, "b", ["a"]), "text to text"),
        ],
    )
    def test_what_is_impossible_is_refused(self, arguments, told):
        with pytest.raises(InvalidRequestError, match=told):
            ReplicaHandle(*arguments)

    def test_world_size(self):
        with pytest.raises(InvalidRequestError, match="world_size"):
            ReplicaHandle(0, "b", world_size=0)

    def test_another_version_is_refused(self):
        data = {**ReplicaHandle(0, "b").to_dict(), "version": 2}
        with pytest.raises(SpecVersionError, match="version 2"):
            ReplicaHandle.from_dict(data)

    @pytest.mark.parametrize("data", ["", "[]", "{}", '{"version": 1}'])
    def test_what_is_no_handle_is_refused(self, data):
        with pytest.raises(InvalidRequestError):
            ReplicaHandle.from_json(data)

    @given(handles)
    def test_pickle(self, handle):
        assert pickle.loads(pickle.dumps(handle)) == handle
