"""What kubectl obeys of a kubeconfig and of the environment is obeyed, or named."""

import base64
import contextlib
import json
import logging
import os
import sys
import traceback

import pytest
from strange_server import strange_server

from diloco_eks import EKSExecutor
from diloco_eks._client._kubeconfig import read_kubeconfig
from diloco_protocol import AuthError, InvalidRequestError, UnavailableError

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    names = ["KUBECONFIG", "KUBERNETES_SERVICE_HOST", "POD_NAMESPACE", *PROXIES]
    for name in [*names, *map(str.lower, PROXIES)]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server():
    with strange_server() as server:
        yield server


@pytest.fixture
def proxy():
    with strange_server() as proxy:
        yield proxy


@pytest.fixture
def asks(tmp_path):
    """Has an executor of a kubeconfig ask for its runs; closes it at the end."""
    executors = []

    def asks(server, *, cluster=None, user=None, **options):
        path = write(tmp_path / "config", server, cluster=cluster, user=user)
        executor = EKSExecutor("image", kubeconfig=path, retry_timeout=0, **options)
        executors.append(executor)
        executor.list_runs()
        return executor

    yield asks
    for executor in executors:
        executor.close()


def write(path, server, *, name="one", cluster=None, user=None, current=True, namespace=None):
    context = {"cluster": name, "user": name, **({"namespace": namespace} if namespace else {})}
    config = {
        "clusters": [{"name": name, "cluster": {"server": server, **(cluster or {})}}],
        "users": [{"name": name, "user": user or {}}],
        "contexts": [{"name": name, "context": context}],
        **({"current-context": name} if current else {}),
    }
    path.write_text(json.dumps(config))
    return path


def credentials(headers):
    return base64.b64decode(headers["Proxy-Authorization"].removeprefix("Basic ")).decode()


class TestImpersonation:
    def test_all_requests_are_somebody_elses(self, server, asks):
        user = {
            "token": "t",
            "as": "ada",
            "as-uid": "7",
            "as-groups": ["trainers"],
            "as-user-extra": {"acme.com/why": ["night run"]},
        }
        asks(server.url, user=user)
        headers = server.asked[0][2]
        assert headers["Authorization"] == "Bearer t"
        assert (headers["Impersonate-User"], headers["Impersonate-Uid"]) == ("ada", "7")
        assert headers["Impersonate-Group"] == "trainers"
        assert headers["Impersonate-Extra-acme.com%2Fwhy"] == "night run"

    def test_a_name_arrives_as_it_is_written(self, server, asks):
        asks(server.url, user={"token": "t", "as": "Zo\xeb \N{SNOWMAN}"})
        sent = server.asked[0][2]["Impersonate-User"]
        assert sent.encode("latin-1").decode() == "Zo\xeb \N{SNOWMAN}"

    @pytest.mark.parametrize(
        "user",
        [
            {"as": " "},
            {"as": "ada\n X-Role: admin"},
            {"as": "ada\u2028"},
            {"as": "ada", "as-groups": [""]},
            {"as": "ada", "as-user-extra": {"why": ["a\r\n b"]}},
        ],
    )
    def test_what_no_header_carries(self, server, asks, user):
        with pytest.raises(InvalidRequestError, match=r"has Impersonate-.* that cannot be sent"):
            asks(server.url, user={"token": "t", **user})
        assert server.asked == []

    @pytest.mark.parametrize(
        "user", [{"as-groups": ["a", "b"]}, {"as-user-extra": {"why": ["a", "b"]}}]
    )
    def test_what_cannot_be_sent_is_not_left_out(self, server, asks, user):
        with pytest.raises(InvalidRequestError, match="has 2 values for Impersonate-"):
            asks(server.url, user={"token": "t", "as": "ada", **user})
        assert server.asked == []

    @pytest.mark.parametrize(
        "user", [{"as-groups": ["a"]}, {"as-uid": "7"}, {"as-user-extra": {"why": ["a"]}}]
    )
    def test_nobody_is_impersonated_without_a_name(self, server, asks, user):
        with pytest.raises(InvalidRequestError, match="and no 'as'"):
            asks(server.url, user={"token": "t", **user})
        assert server.asked == []


class TestProxies:
    def test_the_kubeconfigs(self, server, proxy, asks, monkeypatch):
        monkeypatch.setenv("NO_PROXY", "*")
        address = proxy.url.replace("//", "//us%40er:pa%3Ass@")
        asks(server.url, cluster={"proxy-url": address})
        assert server.asked == []
        (asked,) = proxy.asked
        assert asked[1].startswith(f"{server.url}/apis/batch/v1/namespaces/default/jobs?")
        assert credentials(asked[2]) == "us@er:pa:ss"

    @pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy"])
    def test_the_environments(self, proxy, asks, monkeypatch, name):
        monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
        asks("http://cluster.invalid:8080")
        assert proxy.asked[0][1].startswith("http://cluster.invalid:8080/apis/")

    def test_none_for_this_machine(self, server, proxy, asks, monkeypatch):
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        asks(server.url)
        assert (len(server.asked), proxy.asked) == (1, [])

    @pytest.mark.parametrize("excepted", ["cluster.invalid,*", "*.invalid", "invalid:8080"])
    def test_none_where_the_environment_says_so(self, proxy, asks, monkeypatch, excepted):
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", excepted)
        with pytest.raises(UnavailableError):
            asks("http://cluster.invalid:8080")
        assert proxy.asked == []

    def test_a_kind_that_the_client_does_not_know(self, server, asks):
        with pytest.raises(InvalidRequestError, match=r"socks5://<redacted>@127\.0\.0\.1:1 can"):
            asks(server.url, cluster={"proxy-url": "socks5://u:secret@127.0.0.1:1"})
        assert server.asked == []

    def test_https_has_its_own(self, proxy, asks, monkeypatch):
        """Of the two variables the client takes the other one."""
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(Exception, match="Tunnel connection failed: 501"):
            asks("https://cluster.invalid:8443")


class TestFiles:
    def test_of_several_files_the_first_decides(self, server, tmp_path, monkeypatch):
        """Cluster and namespace come from the same context."""
        with strange_server() as other:
            files = [
                write(tmp_path / "one", server.url, name="one", namespace="team"),
                write(tmp_path / "two", other.url, name="two", namespace="never"),
            ]
            monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, files)))
            with EKSExecutor("image") as executor:
                executor.list_runs()
            assert other.asked == []
        assert "/namespaces/team/jobs" in server.asked[0][1]

    def test_an_empty_file_is_passed_over(self, server, tmp_path, monkeypatch):
        (tmp_path / "empty").write_text("# nothing yet\n")
        files = [tmp_path / "empty", write(tmp_path / "one", server.url)]
        monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, files)))
        with EKSExecutor("image") as executor:
            executor.list_runs()
        assert len(server.asked) == 1

    def test_nothing_but_empty_files(self, tmp_path, monkeypatch):
        (tmp_path / "empty").write_text("")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "empty"))
        with EKSExecutor("image") as executor, pytest.raises(AuthError, match="file is empty"):
            executor.list_runs()

    @pytest.mark.parametrize(
        "cluster", [{"proxy-url": "http://u:pw@127.0.0.1:port"}, {"server": "https://[u:pw@::1"}]
    )
    def test_addresses_that_are_none(self, server, asks, cluster):
        with pytest.raises(AuthError, match="no cluster can be read from") as error:
            asks(server.url, cluster=cluster)
        assert "pw" not in str(error.value)

    def test_a_file_that_is_named_counts_inside_a_cluster_too(self, server, tmp_path, monkeypatch):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBECONFIG", str(write(tmp_path / "one", server.url)))
        with EKSExecutor("image") as executor:
            executor.list_runs()
        assert len(server.asked) == 1


class TestCredentials:
    def plugin(self, program, **more):
        name = "client.authentication.k8s.io/v1"
        return {
            "exec": {
                "apiVersion": name,
                "interactiveMode": "Never",
                "command": sys.executable,
                "args": ["-c", program],
                **more,
            }
        }

    def test_a_plugins(self, server, asks):
        answer = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "kind": "ExecCredential",
            "status": {"token": "from a plugin"},
        }
        asks(server.url, user=self.plugin(f"print({json.dumps(json.dumps(answer))})"))
        assert server.asked[0][2]["Authorization"] == "Bearer from a plugin"

    def test_an_end_of_them_that_no_clock_reaches(self, server, asks):
        answer = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "kind": "ExecCredential",
            "status": {"token": "x", "expirationTimestamp": "0001-01-01T00:00:00+14:00"},
        }
        with pytest.raises(AuthError, match="cannot be loaded anew: OverflowError"):
            asks(server.url, user=self.plugin(f"print({json.dumps(json.dumps(answer))})"))

    @pytest.mark.parametrize("user", ["plugin", "provider"])
    def test_without_any_nobody_goes_on_as_nobody(self, server, asks, user):
        users = {
            "plugin": self.plugin("exit(1)", installHint="install it with care"),
            "provider": {"auth-provider": {"name": "unknown"}},
        }
        hint = "install it with care" if user == "plugin" else "has auth-provider"
        with pytest.raises(AuthError, match=hint):
            asks(server.url, user=users[user])
        assert server.asked == []

    def test_a_user_that_no_file_has(self, server, tmp_path, monkeypatch):
        path = write(tmp_path / "config", server.url)
        path.write_text(path.read_text().replace('"user": "one"', '"user": "two"'))
        with (
            EKSExecutor("image", kubeconfig=path, retry_timeout=0) as executor,
            pytest.raises(AuthError, match="names the user 'two', which no file"),
        ):
            executor.list_runs()
        assert server.asked == []

    @pytest.mark.parametrize("where", ["proxy-url", "environment"])
    def test_none_are_sent_in_clear(self, proxy, tmp_path, monkeypatch, where):
        """Nor by kubectl. To this machine itself they are: nobody is between."""
        cluster = {"proxy-url": proxy.url} if where == "proxy-url" else {}
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        proxy.body = lambda path: b'{"kind": "SelfSubjectAccessReview"}' if "self" in path else b""
        path = write(
            tmp_path / "config",
            "http://cluster.invalid:8080",
            cluster=cluster,
            user={"token": "sesamopenyou", "as": "ada"},
        )
        with EKSExecutor("image", kubeconfig=path, retry_timeout=0) as executor:
            found = executor.check()
        assert {each[2]["Authorization"] for each in proxy.asked} == {None}
        assert proxy.asked[0][2]["Impersonate-User"] == "ada"
        assert any("no credentials are sent" in each.message for each in found)

    V1 = "client.authentication.k8s.io/v1"

    @pytest.mark.parametrize(
        ("user", "match"),
        [
            ({"token": "t", "username": "u", "password": "p"}, "both token and username"),
            ({"tokenFile": "f", "username": "u"}, "both tokenFile and username"),
            ({"username": "u", "exec": {"command": "x"}}, "both exec and username"),
            ({"auth-provider": {"name": "x"}, "exec": {"command": "x"}}, "both exec and auth"),
            ({"client-key": "k", "client-key-data": "eA=="}, "both client-key and client-key-data"),
            ({"password": "p"}, "a password and no username"),
            ({"exec": {"command": "x"}}, "a plugin whose apiVersion is none of"),
            ({"exec": {"apiVersion": f"{V1}alpha1"}}, "a plugin whose apiVersion is none of"),
            (
                {"exec": {"apiVersion": V1, "command": "x"}},
                "a plugin of .* without interactiveMode",
            ),
            (
                {"exec": {"apiVersion": V1, "command": "x", "interactiveMode": "never"}},
                "a plugin whose interactiveMode is none of",
            ),
            ({"exec": {}}, "an empty exec"),
            ({"auth-provider": {}}, "an empty auth-provider"),
        ],
    )
    def test_what_kubectl_reads_otherwise(self, server, asks, user, match):
        with pytest.raises(AuthError, match=f"the kubeconfig's user 'one' has {match}"):
            asks(server.url, user=user)
        assert server.asked == []

    @pytest.mark.parametrize(
        ("cluster", "match"),
        [
            ({"insecure-skip-tls-verify": True, "certificate-authority": "f"}, "both certificate"),
            ({"certificate-authority-data": "eA==", "certificate-authority": "f"}, "both certif"),
            ({"server": "127.0.0.1:80"}, "a server that does not begin with https://"),
            ({"server": "user:hunter2pw@127.0.0.1:80"}, "a server that does not begin with"),
            ({"server": "HTTPS://127.0.0.1:80"}, "a server that does not begin with https://"),
            ({"server": "https:127.0.0.1:80"}, "a server that does not begin with https://"),
            ({"server": "https://127.0.0.1:80/?a=b"}, "a server with a query"),
        ],
    )
    def test_clusters_that_kubectl_reads_otherwise(self, tmp_path, cluster, match):
        path = write(tmp_path / "config", "https://127.0.0.1:9", cluster=cluster)
        with pytest.raises(AuthError, match=f"the kubeconfig's cluster 'one' has {match}") as error:
            read_kubeconfig(path, None)
        assert "hunter2" not in str(error.value)

    def test_a_context_without_a_user(self, tmp_path):
        path = write(tmp_path / "config", "https://127.0.0.1:9")
        path.write_text(path.read_text().replace(', "user": "one"', ""))
        with pytest.raises(AuthError, match="context 'one' names no user"):
            read_kubeconfig(path, None)

    @pytest.mark.parametrize("kind", ["contexts", "clusters", "users"])
    def test_two_of_one_name(self, tmp_path, kind):
        path = write(tmp_path / "config", "https://127.0.0.1:9")
        config = json.loads(path.read_text())
        config[kind] *= 2
        path.write_text(json.dumps(config))
        with pytest.raises(AuthError, match=f"has two {kind} of one name"):
            read_kubeconfig(path, None)

    def test_a_line_end_behind_a_token(self, server, asks, tmp_path):
        (tmp_path / "token").write_text("sesamopenyou\n")
        asks(server.url, user={"tokenFile": str(tmp_path / "token")})
        assert server.asked[0][2]["Authorization"] == "Bearer sesamopenyou"

    def test_a_line_end_behind_a_token_at_every_call(self, server, tmp_path):
        """The client loads it anew for each call."""
        user = {"tokenFile": str(tmp_path / "token")}
        (tmp_path / "token").write_text("sesamopenyou\n")
        with EKSExecutor(
            "image", kubeconfig=write(tmp_path / "config", server.url, user=user)
        ) as executor:
            for _ in range(3):
                executor.list_runs()
        sent = [headers["Authorization"] for _, _, headers in server.asked]
        assert sent == ["Bearer sesamopenyou"] * 3

    def test_a_token_that_cannot_be_sent_is_not_shown(self, server, asks):
        for token in ("sesam\nopenyou", "sesam\n openyou", "sesam\0openyou"):
            with pytest.raises(InvalidRequestError, match="a token that cannot be sent") as error:
                asks(server.url, user={"token": token})
            assert "openyou" not in "".join(traceback.format_exception(error.value))
        assert server.asked == []

    @pytest.mark.parametrize("half", ["client-certificate", "client-key-data"])
    def test_half_a_certificate_is_none(self, server, asks, half):
        with pytest.raises(AuthError, match="either is of use only with the other"):
            asks(server.url, user={half: "eA=="})
        assert server.asked == []

    @pytest.mark.parametrize("field", ["token", "tokenFile"])
    def test_a_blank_token_is_none(self, server, asks, tmp_path, field):
        (tmp_path / "token").write_text("  \n \n")
        value = {"token": "  ", "tokenFile": str(tmp_path / "token")}[field]
        with pytest.raises(InvalidRequestError, match="it is blank"):
            asks(server.url, user={field: value})
        assert server.asked == []

    def test_what_a_plugin_says_is_logged_short_and_without_secrets(self, server, asks, caplog):
        said = "login with --password hunter2 failed \\x1b[2J " + "x" * 5000
        program = f"import sys; print('{said}', file=sys.stderr); exit(1)"
        with pytest.raises(AuthError, match="it gave no credentials"):
            asks(server.url, user=self.plugin(program))
        (record,) = [each for each in caplog.records if each.name == "root"]
        told = record.getMessage()
        assert r"--password <redacted> failed \x1b[2J xxx" in told
        assert len(told) < 600
        logging.getLogger().error("x" * 5000)
        assert caplog.records[-1].getMessage() == "x" * 5000

    def test_what_it_says_later_is_shortened_too(self, server, tmp_path, caplog):
        answer = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "kind": "ExecCredential",
            "status": {"token": "x", "expirationTimestamp": "2020-01-01T00:00:00Z"},
        }
        said = tmp_path / "said"  # a program that fails once this is there
        program = (
            "import os, sys\n"
            f"if os.path.exists({str(said)!r}): sys.exit('login with --password hunter2 failed')\n"
            f"print({json.dumps(json.dumps(answer))})"
        )
        path = write(tmp_path / "config", server.url, user=self.plugin(program))
        with EKSExecutor("image", kubeconfig=path, retry_timeout=0) as executor:
            for _ in range(2):
                executor.list_runs()
            said.touch()
            with contextlib.suppress(AuthError):
                executor.list_runs()
        told = [each.getMessage() for each in caplog.records if each.name == "root"]
        assert len(told) > 0
        assert all("--password <redacted> failed" in each for each in told)

    def test_what_is_not_obeyed_is_named(self, server, tmp_path):
        plugin = {"command": "login", "interactiveMode": "Never"}
        version = "client.authentication.k8s.io/v1"
        user = {"token": "t", "tokenFile": "/none", "exec": {"apiVersion": version, **plugin}}
        path = write(tmp_path / "config", server.url.replace("//", "//a:b@"), user=user)
        server.body = lambda path: b'{"kind": "SelfSubjectAccessReview"}' if "self" in path else b""
        with EKSExecutor("image", kubeconfig=path, retry_timeout=0) as executor:
            found = executor.check()
        named = [each.message for each in found if each.subject == "cluster" and each.ok is None]
        assert [message.split(" ")[0] for message in named] == [
            "interactiveMode:",
            "tokenFile",
            "the",
            "the",
            "credentials",
        ]
        assert "not in the caller's" in named[-2]
        assert "a:b@" not in json.dumps([each.message for each in found])

    @pytest.mark.parametrize("told", [True, False])
    def test_a_plugin_that_is_not_told_an_authority_in_a_file_is_named(self, tmp_path, told):
        plugin = {"command": "aws", "interactiveMode": "IfAvailable", "provideClusterInfo": told}
        user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", **plugin}}
        cluster = {"certificate-authority": "ca.pem"}
        path = write(tmp_path / "config", "https://x", user=user, cluster=cluster)
        named = read_kubeconfig(path, None).unheeded()
        assert [text.split(",")[0] for text in named] == [
            "the plugin aws is told where the certificate-authority is"
        ] * told


def yaml(url, *, current="c", context="c", user="u", cluster="k", inside=("", "")):
    """A kubeconfig as somebody writes it by hand; ``inside``: of what it says more, and what."""
    kind, text = inside
    more = {"context": "", "cluster": "", "user": "", kind: text}
    return f"""
current-context: {current}
contexts: [{{name: {context}, context: {{cluster: {cluster}, user: {user}, {more["context"]}}}}}]
clusters: [{{name: {cluster}, cluster: {{server: "{url}", {more["cluster"]}}}}}]
users: [{{name: {user}, user: {{token: sesamopenyou, {more["user"]}}}}}]
"""


class TestTypes:
    """Values that YAML does not read as text are refused, as by kubectl; none is passed over."""

    @pytest.fixture
    def refused(self, server, tmp_path):
        def refused(text, match):
            (tmp_path / "config").write_text(text)
            with (
                EKSExecutor("image", kubeconfig=tmp_path / "config", retry_timeout=0) as executor,
                pytest.raises(AuthError, match=match) as error,
            ):
                executor.list_runs()
            assert not error.value.retryable
            told = "".join(traceback.format_exception(error.value))
            assert "openyou" not in told.replace(str(tmp_path), "")
            assert server.asked == []

        return refused

    @pytest.mark.parametrize("name", ["5", "on", "2026-11-26", "0x1f", "~", "[a]"])
    def test_names(self, server, refused, name):
        match = "must be text, not .*: put it in quotes"
        if name != "~":
            refused(yaml(server.url, current=name), f"current-context {match}")
        refused(yaml(server.url, context=name), rf"contexts\[0\].name {match}")
        for kind in ("user", "cluster"):
            text = yaml(server.url, **{kind: name})
            refused(text, rf"(contexts\[0\].context.{kind}|{kind}s\[0\].name) {match}")
            quoted = text.replace(f"{kind}: {name}", f"{kind}: 'x'")
            refused(quoted, rf"{kind}s\[0\].name {match}")

    def test_quotes_help(self, server, tmp_path):
        text = yaml(server.url, current="'5'", context="'5'", user="'7'", cluster="'on'")
        (tmp_path / "config").write_text(text.replace("token:", "as: ada, token:"))
        with EKSExecutor("image", kubeconfig=tmp_path / "config") as executor:
            executor.list_runs()
        assert server.asked[0][2]["Impersonate-User"] == "ada"

    @pytest.mark.parametrize(
        ("inside", "match"),
        [
            (("context", "namespace: 123"), r"contexts\[0\].context.namespace must be text"),
            (("cluster", "proxy-url: 8080"), r"clusters\[0\].cluster.proxy-url must be text"),
            (("cluster", "insecure-skip-tls-verify: 'false'"), "must be true or false"),
            (("user", "as: 9"), r"users\[0\].user.as must be text, not a whole number"),
            (("user", "as: a, as-groups: openyou"), "as-groups must be a list, not text"),
            (("user", "as: a, as-groups: [5]"), r"as-groups\[0\] must be text"),
            (("user", "as: a, as-groups: [~]"), r"as-groups\[0\] must be text, not nothing"),
            (("user", "as: a, as-user-extra: openyou"), "as-user-extra must be a mapping"),
            (("user", "as: a, as-user-extra: {x: openyou}"), "as-user-extra.x must be a list"),
            (
                ("user", "as: a, as-user-extra: {5: [openyou]}"),
                "a key of .*as-user-extra must be text",
            ),
            (("user", "password: 12345678"), "password must be text"),
            (("user", "exec: {command: x, args: openyou}"), "exec.args must be a list, not text"),
            (("user", "exec: openyou"), "exec must be a mapping"),
            (("user", "exec: {command: x, env: [{name: A, value: 5}]}"), "value must be text"),
            (
                ("user", "auth-provider: {name: oidc, config: {id-token: 5}}"),
                "id-token must be text",
            ),
        ],
    )
    def test_what_is_used(self, server, refused, inside, match):
        refused(yaml(server.url, inside=inside), match)

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("text", "match"),
        [
            (
                "users: [{called: u, user: {token: sesamopenyou}}]",
                r"users\[0\].name must be text, not nothing",
            ),
            ("users: [{name: u, user: sesamopenyou}]", r"users\[0\].user must be a mapping"),
            ("users: [sesamopenyou]", r"users\[0\] must be a mapping, not text"),
            ("users: {u: sesamopenyou}", "users must be a list, not a mapping"),
            ("[sesamopenyou]", "what it holds must be a mapping, not a list"),
            ("users:\n- name: u\n  token: [sesamopenyou", "is not YAML, line "),
            ("a: sesamopenyou\n---\nb: 1", "is not YAML, line 2"),
            ("[" * 5000, "cannot be read: RecursionError"),
            ("a: 2026-13-45\nb: sesamopenyou", "cannot be read: ValueError"),
            ("a: !!bool sesamopenyou", "cannot be read: KeyError"),
            ("a: !!int ''\nb: sesamopenyou", "cannot be read: IndexError"),
            ("a: !!timestamp sesamopenyou", "cannot be read: AttributeError"),
        ],
    )
    def test_damage(self, refused, text, match):
        refused(text, match)

    def test_of_a_damaged_entry_nothing_is_shown(self, server, refused):
        text = yaml(server.url).replace("user: {token: sesamopenyou, }", "usr: token sesamopenyou")
        refused(text, "Expected key user in .*{...}")

    def test_a_cluster_without_a_server(self, server, refused):
        refused(yaml(server.url).replace(f'server: "{server.url}", ', ""), "'k' has no server")

    def test_what_is_no_utf_8(self, tmp_path):
        (tmp_path / "config").write_bytes(b"# \xe9\n" + yaml("http://127.0.0.1:1").encode())
        with pytest.raises(AuthError, match="cannot be read: UnicodeDecodeError"):
            EKSExecutor("image", kubeconfig=tmp_path / "config").list_runs()
