"""The calls to AWS; no other file makes any, and all their errors become errors of diloco."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from contextvars import ContextVar
from typing import Any, TypeVar

from diloco_protocol import Backoff, DilocoError, UnavailableError
from diloco_protocol.backend import check_size, read_bounded, shown

from ..__about__ import __version__
from .._request import _names as names
from .._request._model import missing_boto3
from .._request._options import SageMakerOptions, check_endpoint
from .._state._facts import JobFacts, Summary, read_job, read_summary
from ._answers import check_answers
from ._errors import NOT_ITS_OWN, MissingError, not_made, to_error
from ._limits import bound_answers, bound_clients

T = TypeVar("T")
_PAGE = 100
_MOST_PAGES = 10_000  # of a list
_KEPT_OF_LIST, _KEPT_OF_JOB = 1 << 28, 1 << 18  # characters
_TIMES = 10  # a whole answer may take this many times as long as one piece of it
_LAST_LOOK = 5.0
"""Seconds that an answer or a list may take past a deadline, so that one look is possible."""
_left: ContextVar[Callable[[], float]] = ContextVar("left", default=lambda: math.inf)
"""Seconds until the caller's deadline, and never less than ``_LAST_LOOK``."""
_LONGEST_KEY, _LONGEST_STREAM = 1024, 512  # characters of names, as S3 and CloudWatch allow them
_ENDPOINT = "the endpoint of AWS (AWS_ENDPOINT_URL, or endpoint_url in the profile)"
_SECONDS_PER_LIST = 0.5  # the service allows two lists per second for the whole account


class Client:
    """Calls to SageMaker, CloudWatch Logs, S3 and STS.

    The boto3 clients are made when they are first needed. Thread-safe.
    """

    def __init__(self, options: SageMakerOptions, backoff: Backoff) -> None:
        self._options = options
        self._backoff = backoff
        self._lock = threading.Lock()
        self._session = options.session
        self._account = ""
        ready = {"sagemaker": options.sagemaker_client, "logs": options.logs_client}
        self._ready = {service: client for service, client in ready.items() if client is not None}
        self._clients: dict[str, Any] = {}
        self._next_list = -math.inf

    @contextlib.contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """Wait for no answer and no list much past a deadline, by the backoff's clock."""
        token = _left.set(lambda: max(_LAST_LOOK, deadline - self._backoff.clock()))
        try:
            yield
        finally:
            _left.reset(token)

    def _time_up(self) -> float:
        """Return when (of ``time.monotonic``) the answer to a request sent now must be complete."""
        return time.monotonic() + min(
            _TIMES * max(self._options.request_timeout, 0.001), _left.get()()
        )

    # --- where ---

    @property
    def region(self) -> str:
        """Return the region to which the calls go.

        Raises:
            InvalidRequestError: No region is known.
        """
        return str(self._of("sagemaker").meta.region_name)

    @property
    def account(self) -> str:
        """Return the account that the credentials belong to; AWS is asked once.

        Raises:
            AuthError: There are no credentials, or they are not accepted.
            BackendError: AWS could not be asked.
        """
        if not self._account:
            self._account = str(self._identity()["Account"])
        return self._account

    def caller(self) -> str:
        """Return the ARN of the caller."""
        return str(self._identity()["Arn"])

    def _identity(self) -> dict[str, Any]:
        return self._call("sts", "get_caller_identity", "find out whose credentials these are")

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for service in clients.keys() - self._ready.keys():
            clients[service].close()

    # --- training jobs ---

    def create(self, request: Mapping[str, Any]) -> str:
        """Create a training job, and return its ARN."""
        what = f"create the training job {request['TrainingJobName']}"
        answer = self._call("sagemaker", "create_training_job", what, **request)
        arn = str(answer["TrainingJobArn"])
        _check_same(request["TrainingJobName"], arn, what)
        return arn

    def describe(self, name: str) -> JobFacts:
        """Return the facts about a training job; MissingError if there is no such job."""
        return self.describe_with_hyperparameters(name)[0]

    def describe_with_hyperparameters(self, name: str) -> tuple[JobFacts, Mapping[str, str]]:
        """Do the same as :meth:`describe`, and also return all hyperparameters of the job."""
        what = f"describe the training job {name}"
        answer = self._call("sagemaker", "describe_training_job", what, TrainingJobName=name)
        _check_same(name, answer["TrainingJobName"], what)
        _check_same(name, answer["TrainingJobArn"], what)
        facts = next(_bounded([read_job(answer)], what, _KEPT_OF_JOB))
        return facts, answer.get("HyperParameters") or {}

    def job_arn(self, name: str, account: str) -> str:
        """Return the ARN of a training job with this name."""
        partition = self._of("sagemaker").meta.partition
        return f"arn:{partition}:sagemaker:{self.region}:{account}:training-job/{name}"

    def is_tagged(self, arn: str, key: str) -> bool:
        """Return whether a job has a tag with this key; its other tags are not kept."""
        pages = self._pages("list_tags", f"list the tags of {arn}", ResourceArn=arn)
        return any(tag["Key"] == key for page in pages for tag in page["Tags"])

    def tag(self, arn: str, key: str, value: str) -> None:
        """Give a job a tag."""
        tags = [{"Key": key, "Value": value}]
        self._call("sagemaker", "add_tags", f"tag {arn}", ResourceArn=arn, Tags=tags)

    def stop(self, name: str) -> None:
        """Ask SageMaker to stop a job; EndedError if it has ended or is already being stopped."""
        what = f"stop the training job {name}"
        self._call("sagemaker", "stop_training_job", what, TrainingJobName=name)

    def delete(self, name: str) -> None:
        """Delete a training job that has ended."""
        what = f"delete the training job {name}"
        self._call("sagemaker", "delete_training_job", what, TrainingJobName=name)

    def list(self, contains: str, **filters: Any) -> Iterator[Summary]:
        """Yield the training jobs whose names contain a text, oldest first.

        At most two pages are requested per second. The service filters after it has cut a page, so
        a page may be empty although others follow.
        """
        what = f"list the training jobs of {contains!r}"
        pages = self._pages(
            "list_training_jobs", what, rate_limited=True,
            NameContains=contains, MaxResults=_PAGE, SortBy="CreationTime", SortOrder="Ascending",
            **filters,
        )  # fmt: skip
        summaries = (read_summary(item) for page in pages for item in page["TrainingJobSummaries"])
        yield from _bounded(summaries, what)

    def search(self, contains: str) -> Iterator[JobFacts]:
        """Yield the training jobs whose names contain a text, in full; their index may lag."""
        expression = {
            "Filters": [{"Name": "TrainingJobName", "Operator": "Contains", "Value": contains}]
        }
        what = f"search for the training jobs of {contains!r}"
        pages = self._pages(
            "search", what, Resource="TrainingJob",
            SearchExpression=expression, MaxResults=_PAGE,
        )  # fmt: skip
        for page in pages:
            for result in page.get("Results") or []:
                job = result.get("TrainingJob") or {}
                if job.get("TrainingJobName") and job.get("CreationTime"):
                    facts = next(_bounded([read_job(job)], what, _KEPT_OF_JOB))
                    _check_same(facts.name, facts.arn or facts.name, what)
                    yield facts

    # --- objects and logs ---

    def read_object(self, bucket: str, key: str, most: int) -> tuple[bytes, float]:
        """Return the content of an object, and when it was written: Unix seconds, as S3 has it.

        Raises:
            MissingError: There is no such object.
            InvalidRequestError: It has more than ``most`` bytes, which are not read.
        """
        name = f"s3://{bucket}/{key}"

        def read(client: Any) -> tuple[bytes, float]:
            answer = client.get_object(Bucket=bucket, Key=key)
            with closing(answer["Body"]) as body:  # as a context manager it gives what it wraps
                check_size(name, answer.get("ContentLength", 0), most)
                return read_bounded(body, most, name), answer["LastModified"].timestamp()

        return self._with("s3", f"read {name}", read)

    def object_keys(self, bucket: str, prefix: str) -> Iterator[Sequence[str]]:
        """Yield the keys of the objects below a prefix, page by page.

        Raises:
            MissingError: There is no such bucket.
        """
        what = f"list s3://{bucket}/{prefix}"
        tokens = ("ContinuationToken", "NextContinuationToken")
        pages = self._pages(
            "list_objects_v2", what, "s3", tokens=tokens, Bucket=bucket, Prefix=prefix
        )
        for page in pages:
            keys = [entry["Key"] for entry in page.get("Contents") or [] if "Key" in entry]
            _check_below(prefix, keys, what)
            yield keys

    def delete_object(self, bucket: str, key: str) -> None:
        """Delete an object; nothing happens if there is none."""
        self._call("s3", "delete_object", f"delete s3://{bucket}/{key}", Bucket=bucket, Key=key)

    def log_streams(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield the job's log streams by name, and when each was created, in milliseconds.

        There are none if the job has written nothing, or if no job of the account ever has.
        """
        what = f"list the log streams of {name}"
        pages = self._pages(
            "describe_log_streams", what, "logs", tokens=("nextToken", "nextToken"),
            logGroupName=names.LOG_GROUP, logStreamNamePrefix=f"{name}/", orderBy="LogStreamName",
        )  # fmt: skip
        with contextlib.suppress(MissingError):
            for page in pages:
                streams = {
                    stream["logStreamName"]: stream["creationTime"] for stream in page["logStreams"]
                }
                _check_below(f"{name}/", streams, what, _LONGEST_STREAM)
                yield from streams.items()

    def log_events(self, stream: str, **query: Any) -> dict[str, Any]:
        """Return a page of a log stream."""
        return self._ask_logs("get_log_events", f"read the log stream {stream}", stream, **query)

    def delete_log_stream(self, stream: str) -> None:
        """Delete a log stream."""
        self._ask_logs("delete_log_stream", f"delete the log stream {stream}", stream)

    def _ask_logs(self, operation: str, what: str, stream: str, **query: Any) -> dict[str, Any]:
        place = {"logGroupName": names.LOG_GROUP, "logStreamName": stream}
        return self._call("logs", operation, what, **place, **query)

    # --- any other service, for check() ---

    def quotas(self) -> Iterator[dict[str, Any]]:
        """Yield SageMaker's quotas in this region, as Service Quotas tells them."""
        pages = self._pages(
            "list_service_quotas", "list the quotas of SageMaker", "service-quotas",
            ServiceCode="sagemaker", MaxResults=_PAGE,
        )  # fmt: skip
        for page in pages:
            yield from page["Quotas"]

    # --- the calls themselves ---

    def _pages(
        self,
        operation: str,
        what: str,
        service: str = "sagemaker",
        *,
        tokens: tuple[str, str] = ("NextToken", "NextToken"),
        rate_limited: bool = False,
        **arguments: Any,
    ) -> Iterator[dict[str, Any]]:
        """Yield the pages of a list; UnavailableError if it does not end, or not in time.

        Args:
            operation: The operation to call.
            what: The purpose of the call, for errors.
            service: The service of the operation.
            tokens: The field of the request that takes the token, and that of the answer that has
                it.
            rate_limited: Whether to wait for the turn of this process to list.
            **arguments: Further arguments of the call.
        """
        request_field, answer_field = tokens
        more: dict[str, Any] = {}
        number, up = 0, self._backoff.clock() + _left.get()()
        while number < _MOST_PAGES and self._backoff.clock() <= up:
            number += 1
            if rate_limited:
                self._wait_for_turn()
            page = self._call(service, operation, what, **arguments, **more)
            yield page
            following = page.get(answer_field)
            if not following:
                return
            if following == more.get(request_field):
                raise _odd(what, "a page leads to itself")
            more = {request_field: following}
        raise UnavailableError(f"cannot {what}: there is no end after {number} pages")

    def _call(self, service: str, operation: str, what: str, **arguments: Any) -> dict[str, Any]:
        return self._with(service, what, lambda client: getattr(client, operation)(**arguments))

    ask = _call
    """Call an operation of any other service, for ``check``."""

    def _with(self, service: str, what: str, act: Callable[[Any], T]) -> T:
        client = self._of(service)
        try:
            return act(client)
        except DilocoError:
            raise
        except Exception as error:  # noqa: BLE001 - raised as one of ours, without its words
            caught = error
        try:
            # Outside the except clause, since an error of diloco looks for secrets in all errors
            # that are being handled, however long they are.
            raise to_error(caught, what).with_traceback(caught.__traceback__)
        finally:
            del caught

    def _wait_for_turn(self) -> None:
        """Sleep until this executor may list again."""
        with self._lock:
            now = self._backoff.clock()
            turn = max(now, self._next_list)
            self._next_list = turn + _SECONDS_PER_LIST
        if turn > now:
            self._backoff.sleep(turn - now)

    def _of(self, service: str) -> Any:
        with self._lock:  # a session is not thread-safe
            if service not in self._clients:
                client = self._ready[service] if service in self._ready else self._make(service)
                check_endpoint(_ENDPOINT, client.meta.endpoint_url)
                check_answers(client)
                bound_answers(client, self._time_up)
                self._clients[service] = client
            return self._clients[service]

    def _make(self, service: str) -> Any:
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise missing_boto3(error) from error
        options = self._options
        seconds = max(options.request_timeout, 0.001)
        config = Config(
            # diloco repeats calls itself, with the injected clock, and all of them slow down
            # together.
            retries={"total_max_attempts": 1, "mode": "standard"},
            defaults_mode="legacy",
            connect_timeout=seconds,
            read_timeout=seconds,
            max_pool_connections=20,
            user_agent_extra=f"diloco-sagemaker/{__version__}",
        )
        # boto3 itself does not look at AWS_REGION, as AWS's other tools do.
        of_session = options.session and options.session.region_name
        of_client = next((client.meta.region_name for client in self._ready.values()), None)
        of_variable = os.environ.get("AWS_REGION", "").strip()
        region = options.region or of_client or of_session or of_variable or None
        try:
            if self._session is None:
                self._session = boto3.Session()
                # For clients that the session makes itself for credentials (AssumeRole, SSO).
                self._session._session.set_default_client_config(config)  # noqa: SLF001
                bound_clients(self._session, self._time_up)
            client = self._session.client(
                service, region_name=region, endpoint_url=options.endpoint_url, config=config
            )
        except Exception as error:  # noqa: BLE001 - raised as one of ours, without its words
            failed = not_made(error, f"make a client of {service}")
            raise failed.with_traceback(error.__traceback__) from None
        return client


def _bounded(jobs: Iterable[T], what: str, most: int | None = None) -> Iterator[T]:
    """Yield what is kept of jobs; UnavailableError if all of it is more than any service says."""
    kept, most = 0, most or _KEPT_OF_LIST
    for job in jobs:
        kept += len(repr(job))
        if kept > most:
            raise _odd(what, f"it says more than {most} characters")
        yield job


def _check_same(name: str, subject: str, what: str) -> None:
    """Refuse an answer that is about another job, as the name or ARN in it shows."""
    if subject.rpartition("/")[2] != name:
        raise _odd(what, f"the answer is about {shown(subject)}")


def _check_below(prefix: str, keys: Iterable[str], what: str, most: int = _LONGEST_KEY) -> None:
    """Refuse an answer with names that were not asked for, or that are too long to be names.

    ``purge`` deletes what such an answer names.
    """
    for name in keys:
        if not name.startswith(prefix) or len(name) > most:
            raise _odd(what, f"the answer has {shown(name)}")


def _odd(what: str, why: str) -> UnavailableError:
    """Return the error for an answer that AWS would not give."""
    return UnavailableError(f"cannot {what}: {why}{NOT_ITS_OWN}")
