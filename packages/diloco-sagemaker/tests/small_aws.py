"""A small AWS on this machine: SageMaker, CloudWatch Logs, S3 and STS answer by script."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACCOUNT = "123456789012"
START = 1_750_000_000.0
NOT_FOUND = ("ValidationException", "Requested resource not found.")


class SmallAWS:
    """Jobs stand as the test has put them; a clock goes on when somebody sleeps."""

    def __init__(self):
        self.lock = threading.RLock()
        self.now = START
        self.jobs = {}
        self.objects = {}
        self.logs = {}
        self.calls = []
        self.faults = []
        """Each (operation, code, message, HTTP status, done all the same or not); used up once."""
        self.lists_lag = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def clock(self):
        with self.lock:
            return self.now

    def sleep(self, seconds):
        with self.lock:
            self.now += seconds

    def count(self, operation):
        return sum(call == operation for call, _ in self.calls)

    def move(self, name, status, secondary, **more):
        """A job goes on to another state."""
        with self.lock:
            self.now += 1
            job = self.jobs[name]
            job.update(
                TrainingJobStatus=status,
                SecondaryStatus=secondary,
                LastModifiedTime=self.now,
                **more,
            )
            job["SecondaryStatusTransitions"].append({"Status": secondary, "StartTime": self.now})

    def answer(self, operation, body):
        with self.lock:
            self.calls.append((operation, body))
            fault = next((each for each in self.faults if each[0] == operation), None)
            if fault is not None:
                self.faults.remove(fault)
                if fault[4]:
                    getattr(self, operation)(body)
                raise Refused(*fault[1:4])
            return getattr(self, operation)(body)

    # --- operations ---

    def CreateTrainingJob(self, body):
        name = body["TrainingJobName"]
        if name in self.jobs:
            raise Refused("ResourceInUse", "Training job names must be unique")
        self.now += 0.25
        self.jobs[name] = {
            **body, "TrainingJobArn": arn(name), "CreationTime": self.now,
            "LastModifiedTime": self.now, "TrainingJobStatus": "InProgress",
            "SecondaryStatus": "Starting",
            "SecondaryStatusTransitions": [{"Status": "Starting", "StartTime": self.now}],
        }  # fmt: skip
        return {"TrainingJobArn": arn(name)}

    def DescribeTrainingJob(self, body):
        job = self._job(body)
        return {key: value for key, value in job.items() if key != "Tags"}

    def StopTrainingJob(self, body):
        job = self._job(body)
        if job["TrainingJobStatus"] != "InProgress":
            status = job["TrainingJobStatus"]
            text = f"The request was rejected because the training job is in status {status}."
            raise Refused("ValidationException", text)
        self.move(body["TrainingJobName"], "Stopping", "Stopping")
        return {}

    def DeleteTrainingJob(self, body):
        job = self._job(body)
        if job["TrainingJobStatus"] == "Stopping":  # some seconds later
            self.move(body["TrainingJobName"], "Stopped", "Stopped")
        if job["TrainingJobStatus"] == "InProgress":
            raise Refused("ResourceInUse", "The training job is in progress")
        del self.jobs[body["TrainingJobName"]]
        return {}

    def ListTrainingJobs(self, body):
        if self.lists_lag:
            return {"TrainingJobSummaries": []}
        after = body.get("CreationTimeAfter", 0)
        keys = (
            "TrainingJobName", "TrainingJobArn", "CreationTime", "LastModifiedTime",
            "TrainingJobStatus", "SecondaryStatus",
        )  # fmt: skip
        jobs = sorted(self.jobs.values(), key=lambda job: job["CreationTime"])
        # As the service: pages are cut first, and filtered afterwards.
        start = int(body.get("NextToken", 0))
        page = jobs[start : start + body["MaxResults"]]
        answer = {
            "TrainingJobSummaries": [
                {key: job[key] for key in keys}
                for job in page
                if body["NameContains"] in job["TrainingJobName"] and job["CreationTime"] >= after
            ]
        }
        if start + body["MaxResults"] < len(jobs):
            answer["NextToken"] = str(start + body["MaxResults"])
        return answer

    def Search(self, body):
        (wanted,) = body["SearchExpression"]["Filters"]
        return {
            "Results": [
                {"TrainingJob": job}
                for job in self.jobs.values()
                if wanted["Value"] in job["TrainingJobName"]
            ]
        }

    def ListTags(self, body):
        return {"Tags": self._job({"TrainingJobName": body["ResourceArn"].split("/")[-1]})["Tags"]}

    def AddTags(self, body):
        job = self._job({"TrainingJobName": body["ResourceArn"].split("/")[-1]})
        job["Tags"] = [*job["Tags"], *body["Tags"]]
        return {"Tags": job["Tags"]}

    def DescribeLogStreams(self, body):
        if not self.logs:
            raise Refused("ResourceNotFoundException", "The specified log group does not exist.")
        found = sorted(name for name in self.logs if name.startswith(body["logStreamNamePrefix"]))
        created = int(self.now * 1000)
        return {"logStreams": [{"logStreamName": name, "creationTime": created} for name in found]}

    def GetLogEvents(self, body):
        """Two events a page, and an empty page before the end."""
        events = self.logs.get(body["logStreamName"])
        if events is None:
            raise Refused("ResourceNotFoundException", "The specified log stream does not exist.")
        token = body.get("nextToken", "f/0" if body["startFromHead"] else f"b/{len(events)}")
        here = int(token[2:])
        if body["startFromHead"]:
            low, high = here, min(here + 2, len(events))
        else:
            low, high = max(0, here - 2), here
        return {
            "events": [{"timestamp": time, "message": text} for time, text in events[low:high]],
            "nextForwardToken": f"f/{high}",
            "nextBackwardToken": f"b/{low}",
        }

    def DeleteLogStream(self, body):
        del self.logs[body["logStreamName"]]
        return {}

    def ListServiceQuotas(self, body):
        return {"Quotas": [{"QuotaName": "ml.g6.xlarge for training job usage", "Value": 2.0}]}

    def DescribeImages(self, body):
        return {"imageDetails": [{"repositoryName": body["repositoryName"]}]}

    def _job(self, body):
        if body["TrainingJobName"] not in self.jobs:
            raise Refused(*NOT_FOUND)
        return self.jobs[body["TrainingJobName"]]


class Refused(Exception):
    def __init__(self, code, message, status=400):
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


def arn(name):
    return f"arn:aws:sagemaker:eu-west-1:{ACCOUNT}:training-job/{name}"


def _handler(aws):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or every answer waits 40 ms for an acknowledgement

        def log_message(self, *_):
            pass

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            target = self.headers.get("X-Amz-Target", "")
            try:
                if target:
                    found = aws.answer(target.partition(".")[2], json.loads(body))
                    self._send(200, json.dumps(found).encode(), "application/x-amz-json-1.1")
                else:
                    (operation,) = re.findall(rb"Action=(\w+)", body)
                    self._send(200, form(operation.decode()), "text/xml")
            except Refused as error:
                text = json.dumps({"__type": error.code, "message": error.message})
                self._send(error.status, text.encode(), "application/x-amz-json-1.1")

        def do_GET(self):
            if "list-type=2" in self.path:
                self._send(
                    200,
                    b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>",
                    "application/xml",
                )
                return
            content = aws.objects.get(self.path.partition("?")[0])
            if content is None:
                text = b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>"
                self._send(404, text, "application/xml")
            else:
                self._send(200, content, "application/octet-stream")

        def do_HEAD(self):
            self.send_response(200)
            self.send_header("x-amz-bucket-region", "eu-west-1")
            self.send_header("x-amz-request-id", "id")
            self.end_headers()

        def do_DELETE(self):
            aws.objects.pop(self.path.partition("?")[0], None)
            self._send(204, b"", "application/xml")

        def _send(self, status, content, kind):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("x-amzn-RequestId" if "json" in kind else "x-amz-request-id", "id")
            self.send_header("Last-Modified", self.date_time_string(aws.now))
            self.end_headers()
            self.wfile.write(content)

    return Handler


def form(operation):
    """What STS and IAM answer."""
    metadata = "<ResponseMetadata><RequestId>id</RequestId></ResponseMetadata>"
    if operation == "SimulatePrincipalPolicy":
        decision = "<EvalActionName>any</EvalActionName><EvalDecision>allowed</EvalDecision>"
        return (
            f'<{operation}Response xmlns="https://iam.amazonaws.com/doc/2010-05-08/">'
            f"<{operation}Result>"
            f"<EvaluationResults><member>{decision}</member></EvaluationResults>"
            f"</{operation}Result>{metadata}</{operation}Response>"
        ).encode()
    return (
        f'<{operation}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        f"<{operation}Result>"
        f"<Arn>arn:aws:iam::{ACCOUNT}:user/somebody</Arn><UserId>A</UserId>"
        f"<Account>{ACCOUNT}</Account></{operation}Result>{metadata}</{operation}Response>"
    ).encode()
