"""~/.aws/config and the variables of AWS's command line hold here too."""

import contextlib
import hashlib
import json
import shutil
import time
import traceback
from pathlib import Path

import boto3
import botocore
import pytest
from botocore.config import Config
from botocore.credentials import SSOProvider

from diloco_protocol import (
    AuthError,
    BackendError,
    Backoff,
    InvalidRequestError,
    ReplicaNotFoundError,
    UnavailableError,
)

#: What the executor decides itself: it tries again and waits by its own options, and for itself it
#: says who it is.
OURS = {"retries", "connect_timeout", "read_timeout", "max_pool_connections", "user_agent_extra"}
FILE = """
[profile mine]
region = eu-west-1
ca_bundle = {bundle}
use_fips_endpoint = true
use_dualstack_endpoint = true
s3 =
    addressing_style = virtual
    payload_signing_enabled = true
    use_arn_region = false
    us_east_1_regional_endpoint = legacy
sts_regional_endpoints = legacy
tcp_keepalive = true
parameter_validation = false
request_checksum_calculation = when_required
response_checksum_validation = when_required
disable_request_compression = true
request_min_compression_size_bytes = 1000
account_id_endpoint_mode = disabled
auth_scheme_preference = sigv4a
sigv4a_signing_region_set = *
sdk_ua_app_id = some-application
s3_disable_express_session_auth = true
{more}

[profile other]
aws_access_key_id = of-the-other
aws_secret_access_key = secret

[services places]
sagemaker =
    endpoint_url = http://127.0.0.1:9/sagemaker
s3 =
    endpoint_url = http://127.0.0.1:9/s3
"""
ROLE = "arn:aws:iam::123456789012:role/mine"
SERVICES = ("sagemaker", "s3", "sts", "logs", "iam", "ecr", "service-quotas")


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Writes the file of a user, whose variables are these alone."""
    import os

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    shutil.copy(Path(botocore.__file__).with_name("cacert.pem"), tmp_path / "bundle.pem")

    def write(more="", **variables):
        text = FILE.format(bundle=tmp_path / "bundle.pem", more=more)
        (tmp_path / "config").write_text(text)
        for name, value in {"AWS_PROFILE": "mine", **variables}.items():
            monkeypatch.setenv(name, value)

    return write


def settings(client):
    told = client.meta.config
    fields = {name: getattr(told, name) for name in Config.OPTION_DEFAULTS if name not in OURS}
    fields.pop("user_agent")  # has user_agent_extra in it
    verify = client._endpoint.http_session._verify
    return fields, client.meta.endpoint_url, client.meta.region_name, verify


@pytest.mark.parametrize(
    ("more", "variables"),
    [
        ("", {}),
        ("services = places", {}),
        ("services = places\nignore_configured_endpoint_urls = true", {}),
        ("services = places", {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}),
        ("services = places", {"AWS_ENDPOINT_URL_SAGEMAKER": "http://127.0.0.1:8"}),
        ("endpoint_url = http://127.0.0.1:7", {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:8"}),
        ("", {"AWS_USE_FIPS_ENDPOINT": "false", "AWS_STS_REGIONAL_ENDPOINTS": "regional"}),
        ("", {"AWS_DEFAULT_REGION": "us-east-1", "HTTPS_PROXY": "http://127.0.0.1:6"}),
        ("", {"AWS_REQUEST_CHECKSUM_CALCULATION": "when_supported"}),
    ],
)
@pytest.mark.parametrize(
    "services", [SERVICES[:3], pytest.param(SERVICES[3:], marks=pytest.mark.slow)]
)
def test_clients_are_those_that_boto3_makes(offline, user, more, variables, services):
    user(
        f"{more}\naws_access_key_id = key\naws_secret_access_key = secret\n",
        **variables,
    )
    ours, session = offline()._client, boto3.Session()
    for service in services:
        assert settings(ours._of(service)) == settings(session.client(service)), service


def test_an_endpoint_of_the_executor_leaves_the_style_of_addresses_to_the_user(offline, user):
    user("aws_access_key_id = key\naws_secret_access_key = secret")
    address = "http://localhost:4566"
    ours = offline(endpoint_url=address)._client._of("s3")
    assert settings(ours) == settings(boto3.Session().client("s3", endpoint_url=address))
    assert ours.meta.config.s3["addressing_style"] == "virtual"


def test_credentials_come_from_where_a_profile_says(aws, offline, user):
    credentials = '{"Version": 1, "AccessKeyId": "of-the-process", "SecretAccessKey": "secret"}'
    for more, key in (
        (f"credential_process = echo '{credentials}'", "of-the-process"),
        ("role_arn = arn:aws:iam::123456789012:role/x\nsource_profile = nobodys", None),
        ("role_arn = arn:aws:iam::123456789012:role/x\ncredential_source = Nowhere", None),
        ("sso_session = nobodys\nsso_account_id = 1\nsso_role_name = x", None),
        ("login_session = arn:aws:iam::123456789012:user/x", None),
    ):
        user(more, AWS_ENDPOINT_URL=aws.url)
        executor = offline(retry_timeout=0)
        if key is None:
            with pytest.raises(AuthError):
                executor.list_runs()
            continue
        assert executor.list_runs() == []
        signer = executor._client._of("sagemaker")._request_signer
        assert signer._credentials.access_key == key


def test_credentials_that_are_expired_when_they_come_are_no_word_of_aws(aws, offline, user):
    """As by a clock that is ahead."""
    told = {"AccessKeyId": "k", "SecretAccessKey": "s", "Expiration": "2001-01-01T00:00:00Z"}
    program = f"credential_process = echo '{json.dumps({'Version': 1, **told})}'"
    user(program, AWS_ENDPOINT_URL=aws.url)
    begun = aws.now
    with pytest.raises(AuthError, match="are still expired"):
        offline(backoff=Backoff(clock=aws.clock, sleep=aws.sleep)).list_runs()
    assert aws.now == begun  # it was not tried again


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("variables", "options", "region"),
    [
        ({}, {}, "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "us-east-1"}, {}, "us-east-1"),
        ({"AWS_REGION": "us-east-2", "AWS_DEFAULT_REGION": "us-east-1"}, {}, "us-east-2"),
        ({"AWS_REGION": "us-east-2\n"}, {}, "us-east-2"),
        ({"AWS_REGION": "us-east-2"}, {"region": "us-west-2"}, "us-west-2"),
        ({"AWS_REGION": "us-east-2", "AWS_PROFILE": "other"}, {}, "us-east-2"),
    ],
)
def test_the_region_is_that_of_the_command_line(offline, user, variables, options, region):
    user("aws_access_key_id = key\naws_secret_access_key = secret", **variables)
    executor = offline(**options)
    assert {executor._client._of(service).meta.region_name for service in ("s3", "logs")} == {
        region
    }


@pytest.mark.sampled
@pytest.mark.parametrize("more", ["", "retry_mode = adaptive\nmax_attempts = 5"])
@pytest.mark.parametrize("variables", [{}, {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "4"}])
def test_a_call_is_made_once(aws, offline, user, monkeypatch, more, variables):
    """And again for as long as the executor's own option says."""
    keys = "aws_access_key_id = key\naws_secret_access_key = secret"
    user(f"{keys}\n{more}", AWS_ENDPOINT_URL=aws.url, **variables)
    asked = []

    def fail(handler):
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        asked.append(handler.path)
        handler._send(503, b'{"message": "not now"}', "application/x-amz-json-1.1")

    monkeypatch.setattr(aws.server.RequestHandlerClass, "do_POST", fail)
    executor = offline(retry_timeout=0)
    with pytest.raises(UnavailableError):
        executor.list_runs()
    assert len(asked) == 1


@pytest.mark.parametrize(("has", "region"), [("us-west-2", "us-west-2"), (None, "us-east-2")])
def test_the_region_of_a_session_that_was_given_is_the_sessions(offline, user, has, region):
    user(AWS_REGION="us-east-2", AWS_PROFILE="other")
    session = boto3.Session(region_name=has)
    assert offline(session=session)._client.region == region


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("more", "variables"),
    [
        ("", {"AWS_METADATA_SERVICE_TIMEOUT": "soon"}),
        ("", {"AWS_REQUEST_CHECKSUM_CALCULATION": "never"}),
        ("", {"AWS_STS_REGIONAL_ENDPOINTS": "elsewhere"}),
        ("", {"AWS_ENDPOINT_URL": "localhost"}),
        ("", {"AWS_ENDPOINT_URL": "http://127.0.0.1:99999"}),
        ("", {"AWS_ENDPOINT_URL": "http://127.0.0.1:port"}),
        (f"role_arn = {ROLE}\nweb_identity_token_file = /nowhere/token", {}),
        ("", {"HTTP_PROXY": "http://127.0.0.1:99999999", "NO_PROXY": "", "no_proxy": ""}),
        *(
            ("", {"HTTP_PROXY": proxy, "NO_PROXY": "", "no_proxy": ""})
            for proxy in (
                "http://:9",
                "http://[::1",
            )
        ),
        ("[unfinished", {}),
        ("credential_process = echo '{'", {}),
        ("credential_process = /nowhere/program", {}),
    ],
)
def test_a_setting_that_is_wrong_is_no_word_of_aws(aws, offline, user, more, variables):
    keys = {} if more else {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    user(
        more,
        **{
            "AWS_ENDPOINT_URL": aws.url,
            **keys,
            **variables,
            **({"AWS_PROFILE": "mine"} if more else {}),
        },
    )
    begun = aws.now
    with pytest.raises(InvalidRequestError) as caught:
        offline(backoff=Backoff(clock=aws.clock, sleep=aws.sleep)).list_runs()
    assert "AWS's own" not in str(caught.value)
    assert aws.now == begun  # it was not tried again
    assert aws.calls == []


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "AWS_ACCOUNT_ID_ENDPOINT_MODE"])
def test_a_setting_that_is_wrong_is_looked_for_in_the_variables(offline, user, variable):
    user(**{variable: ""})
    with pytest.raises(AuthError, match="the variables AWS_"):
        offline().list_runs()


def test_an_empty_variable_names_no_region(offline, user):
    user(AWS_REGION="", AWS_DEFAULT_REGION="eu-central-1")
    assert offline()._client.region == "eu-central-1"


@pytest.mark.parametrize(
    ("pieces", "pause", "words"),
    [
        (None, 0, "cannot list"),
        (10**6, 0.01, "comes too slowly"),
        (2000, 0, "more than 67108864 bytes"),
    ],
    ids=["fails", "drips", "floods"],
)
def test_the_call_that_fetches_credentials_has_the_same_bounds(
    aws, offline, user, monkeypatch, pieces, pause, words
):
    """It is made by a client that boto3 makes by itself."""
    asked = []

    def answer(self):
        asked.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if pieces is None:
            self._send(500, b"", "text/xml")
            return
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(pieces):
                self.wfile.write(b" " if pause else b" " * 65536)
                time.sleep(pause)

    monkeypatch.setattr(aws.server.RequestHandlerClass, "do_POST", answer)
    more = "role_arn = arn:aws:iam::123456789012:role/x\nsource_profile = other\nmax_attempts = 5"
    user(more, AWS_ENDPOINT_URL=aws.url)
    with pytest.raises(UnavailableError, match=words):
        offline(retry_timeout=0, request_timeout=0.5).list_runs()
    assert [b"Action=AssumeRole" in body for body in asked] == [True]


@pytest.fixture
def portal(aws, user, tmp_path, monkeypatch):
    """Writes a profile of SSO and its token; the portal answers with a status and a body."""
    monkeypatch.setattr(SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(tmp_path))

    def write(token, status=404, code="ResourceNotFoundException"):
        place = "https://of-nobody.awsapps.com/start"
        expires = {"accessToken": token, "expiresAt": "2999-01-01T00:00:00Z"}
        file = tmp_path / f"{hashlib.sha1(place.encode()).hexdigest()}.json"
        file.write_text(json.dumps(expires))

        def answer(handler):
            aws.calls.append(("portal", handler.path))
            body = json.dumps({"__type": code, "message": "Requested resource not found"})
            handler._send(status, body.encode(), "application/json")

        monkeypatch.setattr(aws.server.RequestHandlerClass, "do_GET", answer)
        more = f"[profile sso]\nregion = eu-west-1\nsso_start_url = {place}\nsso_account_id = 1\n"
        more += "sso_region = eu-west-1\nsso_role_name = x"
        user(more, AWS_ENDPOINT_URL=aws.url, AWS_PROFILE="sso")

    return write


def test_credentials_that_are_gone_are_no_job_that_is_gone(aws, executor, offline, portal):
    handles = executor().launch_replicas(3, "trainer:train", run_id="run-1")
    portal("token")
    backoff = Backoff(clock=aws.clock, sleep=aws.sleep)
    ours = offline(backoff=backoff, retry_timeout=0, clock=lambda: aws.now + 3600)
    ours._client._account = handles[0].metadata["account"]  # it was asked for before that
    for verb in (
        lambda: ours.poll(handles[0]),
        lambda: ours.cancel(handles[0]),
        lambda: ours.purge(handles[0]),
        lambda: ours.collect(handles, timeout=0),
        lambda: ours.collect(handles[:1], timeout=0),
        lambda: ours.exists("run-1"),
    ):
        with pytest.raises(BackendError, match="Requested resource not found") as caught:
            verb()
        assert not isinstance(caught.value, ReplicaNotFoundError)
    assert ("portal", "/federation/credentials?role_name=x&account_id=1") in aws.calls


@pytest.mark.parametrize("end", ["\n", "\r\nrest", ["as a list"]])
def test_a_token_of_sso_that_cannot_be_sent_is_not_shown(aws, offline, portal, end):
    secret = "aoaAAAAAGkExAmPlEtOkEn"
    portal([secret, *end] if isinstance(end, list) else secret + end)
    begun = aws.now
    with pytest.raises((AuthError, InvalidRequestError)) as caught:
        offline(backoff=Backoff(clock=aws.clock, sleep=aws.sleep)).list_runs()
    assert secret not in "".join(traceback.format_exception(caught.value))
    assert aws.now == begun  # it was not tried again
