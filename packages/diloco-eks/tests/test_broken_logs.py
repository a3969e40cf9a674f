"""Log followers whose connections break, whatever the clocks say, and that end with the run."""

import itertools
import json
import time
from collections import Counter
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import pytest
from strange_server import strange_server

from diloco_eks import EKSExecutor
from diloco_protocol import Backoff, ReplicaHandle, UnavailableError

NOW = time.time()


def at(seconds):
    return datetime.fromtimestamp(NOW + seconds, UTC).isoformat()


class Cluster:
    """One run whose log breaks off once, then ends; ``ahead`` is the clock of its node."""

    def __init__(self, a_job, a_pod):
        self.a_job, self.a_pod = a_job, a_pod
        self.log, self.breaks_after, self.ahead = [], 0, 0.0
        self.pods = {"run-1-0-aaaaa": "Running"}
        self.opened = 0
        self.server = None

    @property
    def ended(self):
        return "Running" not in self.pods.values()

    def answer(self, path):
        parts = urlsplit(path)
        self.server.breaks = False
        if parts.path.endswith("/log"):
            return self.read(parse_qs(parts.query))
        if parts.path.endswith("/pods"):
            return json.dumps({"kind": "PodList", "items": list(map(self.pod, self.pods))}).encode()
        done = {"completedIndexes": "0", "conditions": [{"type": "Complete", "status": "True"}]}
        return json.dumps({"kind": "Job", **self.a_job(1, done if self.ended else {})}).encode()

    def pod(self, name):
        owner = {"uid": "u-1", "controller": True}
        end = {"terminated": {"exitCode": 0}} if self.ended else None
        pod = self.a_pod(0, self.pods[name], end, name=name)
        pod["metadata"] |= {"ownerReferences": [owner], "uid": name}
        return pod

    def read(self, query):
        self.opened += 1
        lines = self.log
        if self.opened == 1 and self.breaks_after:
            lines, self.server.breaks = lines[: self.breaks_after], True
        else:
            self.pods = dict.fromkeys(self.pods, "Succeeded")
        if "sinceSeconds" in query:
            since = time.time() + self.ahead - int(query["sinceSeconds"][0])
            lines = [line for line in lines if datetime.fromisoformat(line[0]).timestamp() >= since]
        return "".join(f"{stamp} {text}\n" for stamp, text in lines).encode()


@pytest.fixture
def cluster(a_job, a_pod):
    cluster = Cluster(a_job, a_pod)
    with strange_server(body=cluster.answer) as cluster.server:
        yield cluster


@pytest.fixture
def lines_of(cluster, tmp_path):
    """Reads the log of the replica."""
    url, path = cluster.server.url, tmp_path / "config"
    where = {
        "clusters": [{"name": "one", "cluster": {"server": url}}],
        "contexts": [{"name": "one", "context": {"cluster": "one"}}],
        "current-context": "one",
    }
    path.write_text(json.dumps(where))
    metadata = {"job_name": "run-1", "namespace": "default", "server": url, "job_uid": "u-1"}
    handle = ReplicaHandle(0, "eks", {**metadata, "first_rank": "0"}, run_id="run-1", world_size=1)
    backoff = Backoff(first=0.01, cap=0.05)
    with EKSExecutor("image", kubeconfig=path, backoff=backoff, retry_timeout=1) as executor:
        yield lambda **options: executor.log_iter(handle, **options)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stamps", "breaks_after", "ahead"),
    [
        ([at(-5.2), at(-5.1), at(-5.15), at(-4)], 2, 0),
        ([at(-9), at(-8), at(-7), at(-8.5), at(-7.5)], 4, 0),
        (
            [
                "2026-10-25T02:59:58+02:00",
                "2026-10-25T02:59:59+02:00",
                "2026-10-25T02:00:00+01:00",
                "2026-10-25T02:59:59+01:00",
            ],
            2,
            0,
        ),
        ([at(12), at(9.5), at(10.5), at(13)], 1, 0),
        ([at(110 + number) for number in range(9)], 3, 120),
        ([at(-1)] * 4, 2, 0),
    ],
    ids=["two streams", "set back", "summer time", "unsorted", "a clock that is ahead", "the same"],
)
def test_what_comes_after_a_break_is_all_that_was_not_read(
    cluster, lines_of, stamps, breaks_after, ahead
):
    texts = [f"line {number}" for number in range(len(stamps))]
    cluster.log = list(zip(stamps, texts, strict=True))
    cluster.breaks_after, cluster.ahead = breaks_after, ahead
    assert list(lines_of(follow=True)) == texts


def test_a_long_log_is_not_read_again_from_its_beginning(cluster, lines_of):
    cluster.log = [(at(number), f"line {number}") for number in range(2500)]
    cluster.breaks_after = 2400
    assert list(lines_of(follow=True)) == [text for _, text in cluster.log]
    queries = [parse_qs(urlsplit(path).query) for _, path, _ in cluster.server.asked]
    assert [query["tailLines"] for query in queries if "tailLines" in query] == [["1000"]]


def test_two_pods_of_the_same_second_are_followed_once(cluster, lines_of):
    cluster.log = [(at(0), "line")]
    cluster.pods = {"run-1-0-aaaaa": "Succeeded", "run-1-0-bbbbb": "Failed"}
    assert Counter(itertools.islice(lines_of(follow=True), 10)) == {"line": 2}


@pytest.mark.parametrize("follow", [False, True])
def test_a_log_of_which_nothing_comes_is_given_up(cluster, lines_of, follow):
    """Each time its connection is opened, and breaks off."""

    def read(query):
        cluster.opened += 1
        cluster.server.breaks = cluster.opened < 500
        if not cluster.server.breaks:
            cluster.pods = {"run-1-0-aaaaa": "Succeeded"}
        return b""

    cluster.read = read
    with pytest.raises(UnavailableError) as caught:
        next(lines_of(follow=follow))
    assert cluster.opened < 500
    assert caught.value.__notes__ == ["given up after 1 s of trying again"]


def test_who_closes_before_the_first_line_reads_nothing(cluster, lines_of):
    cluster.log = [(at(0), "line")]
    lines = lines_of()
    lines.close()
    assert list(lines) == []
    assert cluster.opened == 0
