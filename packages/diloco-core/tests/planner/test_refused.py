"""What cannot be planned is refused by name."""

import math

import numpy as np
import pytest

from diloco_core import (
    ConfigurationError,
    StoreModel,
    Transfer,
    plan_exchange,
)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((0, 2, 1e9), "params"),
        ((1e6, 0, 1e9), "replicas"),
        ((1e6, 2.5, 1e9), "replicas"),
        ((1e6, 2, -1), "bandwidth"),
        ((1e6, 2, math.inf), "bandwidth"),
        ((1e6, 2, "fast"), "bandwidth"),
    ],
)
def test_impossible_arguments(arguments, word):
    with pytest.raises(ConfigurationError, match=word):
        plan_exchange(*arguments)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"transfer": {"connections": 3}}, "transfer must be a Transfer, not "),
        ({"transfer": 16}, "transfer must be a Transfer, not "),
        ({"store": {"reads": 3}}, "store must be a StoreModel, not "),
    ],
)
@pytest.mark.parametrize(
    "kind", [{"fixed": True}, {"topology": "sharded"}, {"topology": "gather"}, {}]
)
def test_what_connect_would_refuse_is_not_planned(options, word, kind):
    with pytest.raises(ConfigurationError, match=word):
        plan_exchange(1e8, 8, 1e9, **kind, **options)


def test_a_plan_may_be_made_for_another_machine():
    """How many connections a process may have is not the same everywhere."""
    assert plan_exchange(1e8, 8, 1e9, transfer=Transfer(connections=10**7)).seconds > 0


def test_impossible_options():
    with pytest.raises(
        ConfigurationError, match="outer_state must be a number of tensors, 0 or more, not -1"
    ):
        plan_exchange(1e6, 2, 1e9, outer_state=-1)
    with pytest.raises(ConfigurationError, match="tensors must be a whole number"):
        plan_exchange(1e6, 2, 1e9, tensors=0)
    with pytest.raises(ConfigurationError, match="publish_every"):
        plan_exchange(1e6, 2, 1e9, publish_every=0)
    for fragments in (0, 2.0, "strided"):
        with pytest.raises(ConfigurationError, match="fragments must be a whole number"):
            plan_exchange(1e6, 2, 1e9, fragments=fragments)
    with pytest.raises(ConfigurationError, match="fixed must be True or False, not 'yes'"):
        plan_exchange(1e6, 2, 1e9, fixed="yes")
    with pytest.raises(
        ConfigurationError, match="runs with fixed membership always use the sharded topology"
    ):
        plan_exchange(1e6, 2, 1e9, fixed=True, topology="gather")
    with pytest.raises(ConfigurationError, match="'auto', 'sharded', 'gather', not 'ring'"):
        plan_exchange(1e6, 2, 1e9, topology="ring")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"replicas": 100_001}, "replicas must be at most 100,000, not 100001"),
        ({"topology": ["sharded"]}, "topology must be"),
        ({"clip": ["median"]}, "clip must be"),
        *(
            ({name: value}, "cannot be computed")
            for name, value in [
                ("params", 1e308),
                ("outer_state", 1e305),
                ("bandwidth", 1e-300),
                ("bytes_per_param", 1e300),
                ("tensors", 10**400),
                ("fragments", 10**400),
                ("publish_every", 10**400),
                ("store", StoreModel(page=10**400)),
            ]
        ),
    ],
)
def test_what_overflows_or_is_no_word(options, word):
    with pytest.raises(ConfigurationError, match=word):
        plan_exchange(**{"params": 1e8, "replicas": 4, "bandwidth": 1e9, **options})


def test_numbers_of_numpy_are_numbers():
    plain = plan_exchange(1e6, 4, 1e9, clip="median", tensors=7)
    assert plan_exchange(1e6, np.int64(4), 1e9, clip="median", tensors=np.int64(7)) == plain


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("connection_bandwidth", 0),
        ("first_byte", -0.1),
        ("put", math.inf),
        ("poll", "often"),
        ("reads", 0),
        ("writes", -1),
        ("page", 0.5),
        ("put_price", -1),
        ("get_price", None),
        ("egress_price", -1),
    ],
)
def test_impossible_stores(field, value):
    with pytest.raises(ConfigurationError, match=f"{field} must be .*, not {value!r}"):
        StoreModel(**{field: value})
