"""Answers that are not AWS's, or only half of one, say nothing of jobs and results."""

import pytest
from bad_network import BadNetwork

from diloco_protocol import Outcome, UnavailableError


class Always(BadNetwork):
    """One thing happens to all requests of a kind."""

    kind, always = "", None

    def fate(self, what):
        return self.always if what.startswith(self.kind) else None


@pytest.fixture
def network(aws):
    made = Always(aws.url)
    try:
        yield made
    finally:
        made.close()


def launch(executor):
    return executor.launch_replicas(1, "trainer:train", run_id="run-1")


@pytest.mark.parametrize("kind", ["ListTrainingJobs", "DescribeTrainingJob"])
def test_half_an_answer_is_not_an_empty_one(executor, network, kind):
    handles = launch(executor())
    shaken = executor(endpoint_url=network.url, retry_timeout=5)
    network.kind, network.always = kind, "cut"
    with pytest.raises(UnavailableError, match="of the answer came"):
        shaken.attach("run-1")
    network.always = None
    assert shaken.attach("run-1") == handles


def test_a_client_that_was_handed_in_is_looked_after_too(executor, network):
    launch(executor())
    first = executor(endpoint_url=network.url, retry_timeout=5)
    first.attach("run-1")
    second = executor(sagemaker_client=first._client._of("sagemaker"), retry_timeout=5)
    network.kind, network.always = "ListTrainingJobs", "cut"
    with pytest.raises(UnavailableError, match="of the answer came"):
        second.attach("run-1")


@pytest.mark.parametrize("words", ["<html>Not Found</html>", ""])
def test_a_404_that_is_not_of_s3_loses_no_result(aws, executor, monkeypatch, words):
    (handle,) = launch(executor())
    name = handle.metadata["job_name"]
    aws.move(name, "InProgress", "Training")
    aws.move(name, "Completed", "Completed")
    handler = aws.server.RequestHandlerClass

    def not_found(self):
        self._send(404, words.encode(), "text/html")

    with monkeypatch.context() as patch:
        patch.setattr(handler, "do_GET", not_found)
        with pytest.raises(UnavailableError, match="not AWS's own"):
            executor(retry_timeout=5).collect([handle], timeout=30)
    aws.objects[f"/bucket/runs/{name}/output/model/diloco-outcome.json"] = (
        Outcome(0, result="here").to_json().encode()
    )
    (result,) = executor().collect([handle], timeout=30)
    assert result["result"] == "here"
