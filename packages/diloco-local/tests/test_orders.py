import pytest

from diloco_local._orders import Setting, check_request, fingerprint, make_orders, show_orders
from diloco_local._rundir import RunDir
from diloco_protocol import InvalidRequestError, make_request

SETTING = Setting("/bin/python", "/work", ("/mods",), 2.0, {"PATH": "/bin", "A": "inherited"})


def request(**options):
    return make_request(2, "m:f", {"x": [1, {"y": None}]}, run_id="r", **options)


def test_orders_follow_the_request():
    orders = make_orders(request(env={"A": "own"}, timeout=5), SETTING, ["0", "1"])
    assert [order.rank for order in orders] == [0, 1]
    assert [order.env["CUDA_VISIBLE_DEVICES"] for order in orders] == ["0", "1"]
    for order in orders:
        assert order.env["A"] == "own"
        assert order.env["PYTHONPATH"] == "/mods"
        assert order.cwd == "/work"
        assert (order.spec.kwargs, order.spec.timeout, order.spec.grace) == (
            {"x": [1, {"y": None}]},
            5.0,
            2.0,
        )


def test_what_is_shown(tmp_path):
    orders = make_orders(request(env={"MY_API_KEY": "hush", "B": "2"}), SETTING, [None, None])
    shown = show_orders(RunDir(tmp_path), orders, SETTING.base)
    assert shown[1]["env"] == {"B": "2", "MY_API_KEY": "hush", "PYTHONPATH": "/mods"}
    assert shown[1]["inherited"] == ["A", "PATH"]
    assert shown[1]["run"] == str(tmp_path)
    assert "/bin" not in shown[1]["env"].values()  # inherited values are not shown


def test_the_fingerprint_is_of_what_was_asked():
    assert fingerprint(request(), "p", None) == fingerprint(request(), "p", None)
    different = {
        fingerprint(request(), "p", None),
        fingerprint(request(timeout=1), "p", None),
        fingerprint(request(env={"A": "1"}), "p", None),
        fingerprint(request(), "q", None),
        fingerprint(request(), "p", "/work"),
    }
    assert len(different) == 5


@pytest.mark.parametrize(
    "options",
    [
        {"spot": True},
        {"secrets": {"A": "b"}},
        {"cpu": 2},
        {"memory": "1Gi"},
        {"env": {"DILOCO_LOCAL_REPLICA": ""}},
    ],
)
def test_refusals(options):
    with pytest.raises(InvalidRequestError, match="cannot be honoured by local processes"):
        check_request(request(**options))


def test_a_refusal_shows_the_beginning_of_what_is_long():
    with pytest.raises(InvalidRequestError, match=r"^cpu='9{150,250}\W+ cannot be honoured"):
        check_request(request(cpu="9" * 1_000_000))


def test_what_asks_for_nothing_is_allowed():
    check_request(request(spot=False, secrets={}))
