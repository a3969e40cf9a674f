"""Test that what cannot be planned is refused by name."""

import math

import numpy as np
import pytest

from diloco_core import ConfigurationError, StoreModel, Transfer, plan_exchange


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"params": 0}, "params"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2.5}, "replicas"),
        ({"replicas": 100_001}, "replicas must be at most 100,000, not 100001"),
        *(({"bandwidth": value}, "bandwidth") for value in (-1, math.inf, "fast")),
        *(({"transfer": value}, "must be a Transfer, not ") for value in ({"connections": 3}, 16)),
        ({"store": {"reads": 3}}, "store must be a StoreModel, not "),
        ({"outer_state": -1}, "outer_state must be a number of tensors, 0 or more, not -1"),
        ({"tensors": 0}, "tensors must be a whole number"),
        ({"publish_every": 0}, "publish_every"),
        *(
            ({"publish_every": 9} | sharded, "publish_every=9 has no effect on the sharded")
            for sharded in (
                {},  # auto has chosen it
                {"topology": "sharded"},
                {"fixed": True},
                {"state_codec": "int8"},
            )
        ),
        ({"full_state_every": 9}, "full_state_every=9 needs a state_codec"),
        *(({"fragments": value}, "fragments must be a whole") for value in (0, 2.0, "strided")),
        ({"fixed": "yes"}, "fixed must be True or False, not 'yes'"),
        ({"fixed": True, "topology": "gather"}, "fixed membership always use the sharded topol"),
        ({"topology": "ring"}, "'auto', 'sharded', 'gather', not 'ring'"),
        ({"topology": ["sharded"]}, "topology must be"),
        ({"clip": ["median"]}, "clip must be"),
        ({"state_codec": "topk64"}, "'topk64' sends only a few of the values"),
        ({"state_codec": "int8", "topology": "gather"}, "int8' cannot .* topology='gather'"),
        ({"fixed": True, "state_codec": "int8", "full_state_every": 0}, "full_state_every"),
        ({"state_codec": "int8", "outer_state": 2}, "outer_state is 2, .* only SGD"),
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
def test_what_cannot_be_planned(options, word):
    with pytest.raises(ConfigurationError, match=word):
        plan_exchange(**{"params": 1e8, "replicas": 4, "bandwidth": 1e9, **options})


def test_what_can():
    """The number of connections that a process may have is not the same on every machine."""
    assert plan_exchange(1e8, 8, 1e9, transfer=Transfer(connections=10**7)).seconds > 0
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
