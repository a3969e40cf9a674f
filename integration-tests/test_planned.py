"""The planner foresees what ``hatch run bench-scale`` counts, and what it writes into the docs."""

import xml.etree.ElementTree as ET

import pytest

from diloco_core import Transfer, plan_exchange
from diloco_core._planner._plan import USUAL_BANDWIDTH

MIB = 2**20
BYTES, REQUESTS, SECONDS = 0.05, 0.05, 0.15
"""How far off a plan may be."""
CHORES = 0.5
"""Requests that only some syncs make: a beat, a look at the manifest, an early listing."""

QUICK = [
    ("fixed", 4, 8e6),
    ("fixed", 4, 1e8),
    ("fixed", 12, 8e6),
    ("sharded", 4, 8e6),
    ("sharded", 4, 32e6),
    ("sharded", 8, 8e6),
    ("gather", 4, 8e6),
    ("gather", 8, 8e6),
    ("gather", 4, 32e6),
]
SLOW = [
    ("fixed", 16, 1e8),
    ("fixed", 4, 1e9),
    ("fixed", 64, 1e8),
    ("fixed", 128, 8e6),
    ("sharded", 4, 1e9),
    ("sharded", 64, 1e8),
    ("sharded", 128, 8e6),
    ("gather", 4, 1e8),
    ("gather", 16, 1e6),
    ("gather", 64, 1e6),
]


def disagreements(found, plan):
    """In what a plan is too far off."""
    pairs = {
        "GET": (plan.gets, found.requests["GET"], REQUESTS, CHORES),
        "PUT": (plan.puts, found.requests["PUT"], REQUESTS, CHORES),
        "LIST": (plan.lists, found.requests["LIST"], REQUESTS, CHORES),
        "DELETE": (plan.deletes, found.requests["DELETE"], REQUESTS, CHORES),
        "all requests": (
            plan.gets + plan.puts + plan.lists + plan.deletes, sum(found.requests.values()),
            REQUESTS, 0,
        ),
        "bytes sent": (plan.bytes_sent, found.sent, BYTES, 0),
        "bytes received": (plan.bytes_received, found.received, BYTES, 0),
        "seconds": (plan.seconds, found.seconds, SECONDS, 0),
        "dollars": (plan.cost, found.dollars, 2 * REQUESTS, 0),
    }  # fmt: skip
    return {
        what: (planned, counted)
        for what, (planned, counted, share, more) in pairs.items()
        if abs(planned - counted) > share * counted + more
    }


def names(cells):
    return [f"{kind}-{replicas}-{parameters / 1e6:g}M" for kind, replicas, parameters in cells]


class TestPlanned:
    @pytest.mark.sampled
    @pytest.mark.parametrize("cell", QUICK, ids=names(QUICK))
    def test_as_counted(self, scale, cell):
        assert disagreements(*scale.compare(*cell)) == {}

    @pytest.mark.slow
    @pytest.mark.parametrize("cell", SLOW, ids=names(SLOW))
    def test_as_counted_with_many_replicas_and_large_models(self, scale, cell):
        assert disagreements(*scale.compare(*cell)) == {}

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("kind", "replicas", "parameters", "transfer", "s3"),
        [
            ("gather", 3, 1e6, Transfer(block_bytes=MIB // 4), {}),
            ("gather", 3, 4e6, Transfer(8, 5 * MIB // 2, 10 * MIB), {"latency": 0.05}),
            ("fixed", 2, 3167737, Transfer(1), {"latency": 0.01, "connection": 2e7}),
            ("sharded", 2, 1.4e6, Transfer(1), {"latency": 0.01, "connection": 2e7}),
            (
                "fixed",
                2,
                3167737,
                Transfer(16, MIB, 10 * MIB),
                {"latency": 0.01, "connection": 2e7},
            ),
        ],
        ids=[
            "blocks below a chunk",
            "blocks of no whole chunks",
            "one connection",
            "one, elastic",
            "one part at a time",
        ],
    )
    def test_with_another_transfer(self, scale, kind, replicas, parameters, transfer, s3):
        found, plan = scale.compared(
            kind, replicas, parameters, transfer=transfer, s3=scale.s3.S3(**s3)
        )
        assert disagreements(found, plan) == {}

    @pytest.mark.sampled
    @pytest.mark.parametrize("codec", ["bf16", "int8"])
    @pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
    def test_with_a_codec(self, scale, kind, codec):
        found, plan = scale.compared(kind, 4, 8e6, codec=codec)
        # Here, where sizes are scaled down, a block of int8 is larger than a chunk, and so cuts
        # other ranges.
        cut = {"GET", "all requests"} if codec == "int8" else set()
        assert disagreements(found, plan).keys() <= cut
        plain = plan_exchange(
            8e6,
            4,
            1e9,
            fixed=kind == "fixed",
            topology="gather" if kind == "gather" else "sharded",
        )
        assert plan.bytes_received < 0.8 * plain.bytes_received
        for planned, counted in (
            (plan.bytes_sent, found.sent),
            (plan.bytes_received, found.received),
        ):
            assert abs(planned - counted) < 0.02 * counted

    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
    def test_with_clipping(self, scale, kind):
        found, plan = scale.compared(kind, 4, 8e6, clip="median")
        assert disagreements(found, plan) == {}
        for planned, counted in (
            (plan.bytes_sent, found.sent),
            (plan.bytes_received, found.received),
        ):
            assert abs(planned - counted) < 0.02 * counted

    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", ["fixed", "sharded", "gather"])
    def test_where_the_prefix_takes_few_requests(self, scale, kind):
        """A replica let through early looks for the others, so it makes more small requests."""
        found, plan = scale.compared(kind, 8, 1e6, s3=scale.s3.S3(reads=100.0))
        assert disagreements(found, plan).keys() <= {"PUT", "LIST", "all requests", "dollars"}
        assert plan.seconds > 2 * scale.s3.S3().latency * plan.gets, "the rate decides"


@pytest.mark.sampled
@pytest.mark.parametrize(("parameters", "replicas"), [(1e6, 6), (8e6, 4), (8e6, 8), (32e6, 4)])
def test_auto_chooses_the_topology_that_is_found_quicker(scale, parameters, replicas):
    seconds, planned = {}, {}
    for kind in ("sharded", "gather"):
        found, plan = scale.compare(kind, replicas, parameters)
        seconds[kind], planned[kind] = found.seconds, plan.seconds
    quicker = min(seconds, key=seconds.get)
    assert min(planned, key=planned.get) == quicker, seconds
    unknown = plan_exchange(parameters, replicas, USUAL_BANDWIDTH)
    assert unknown.topology == quicker, "also where nothing is known of the network"


class TestThePage:
    """``hatch run bench-scale --write``."""

    RUN = (
        "--kinds",
        "fixed",
        "gather",
        "--parameters",
        "1M",
        "--replicas",
        "2",
        "3",
        "--most-requests",
        "17",
    )

    def test_tables_and_picture(self, scale, tmp_path, capsys):
        page = tmp_path / "docs/scale.md"
        scale.command.main([*self.RUN, "--write", str(page)])
        first = page.read_text()
        page.write_text(
            first.replace("<!-- bench", "# Title\n\n<!-- bench", 1).replace("| 2 |", "| old |")
            + "the end\n"
        )
        page.write_text(page.read_text())
        scale.command.main([*self.RUN, "--write", str(page)])
        assert page.read_text() == f"# Title\n\n{first}the end\n", (
            "what stands around the tables stays, and they come again"
        )
        rows = [line.split("|")[1:-1] for line in first.splitlines() if line.startswith("| fixed")]
        steady, *_ = ([cell.strip() for cell in row] for row in rows)
        assert steady[:3] == ["fixed", "1M", "2"]
        assert all(" / " in cell for cell in steady[3:8] + steady[-3:]), "counted and planned"
        left_out = [line for line in first.splitlines() if "| - /" in line]
        assert len(left_out) == 2, "two runs have too many requests: their plans are shown alone"
        picture = ET.fromstring(page.with_suffix(".svg").read_text())
        assert [
            text.text
            for text in picture.iter("{http://www.w3.org/2000/svg}text")
            if text.get("class") == "t"
        ] == [
            "fixed",
            "gather",
        ]

    def test_a_page_that_has_no_place_for_them_is_left_alone(self, scale, tmp_path):
        page = tmp_path / "scale.md"
        page.write_text("something else")
        with pytest.raises(SystemExit, match="no place for the tables"):
            scale.page.write(page, scale.s3.S3(), [])
        assert page.read_text() == "something else"


def test_a_plan_that_is_off_is_noticed(scale):
    found, _ = scale.compare("fixed", 4, 8e6)
    assert disagreements(found, plan_exchange(8e6, 5, 1.25e9, fixed=True)) != {}
