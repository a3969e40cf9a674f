"""What kubectl obeys of a kubeconfig and of the environment is obeyed, or named."""

import base64
import json
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
    @pytest.mark.parametrize("field", ["as", "as-uid", "as-groups", "as-user-extra"])
    def test_it_is_refused_and_not_left_out(self, server, asks, field):
        with pytest.raises(AuthError, match=f"'one' has '{field}', which is not obeyed"):
            asks(server.url, user={"token": "t", field: "ada"})
        assert server.asked == []


class TestProxies:
    def test_the_kubeconfigs(self, proxy, asks, monkeypatch):
        monkeypatch.setenv("NO_PROXY", "*")
        proxy.raw = b"HTTP/1.1 501 no\r\n\r\n"
        address = proxy.url.replace("//", "//us%40er:pa%3Ass@")
        with pytest.raises(UnavailableError, match="Tunnel connection failed: 501"):
            asks(
                "https://cluster.invalid:8443",
                cluster={"proxy-url": address},
                user={"token": "t"},
            )
        told = proxy.asked[0][2]
        assert credentials(told) == "us@er:pa:ss"
        assert "Authorization" not in told

    def test_none_for_this_machine(self, server, proxy, asks, monkeypatch):
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        asks(server.url)
        assert (len(server.asked), proxy.asked) == (1, [])

    @pytest.mark.parametrize("excepted", ["cluster.invalid", "other,.invalid"])
    def test_none_where_the_environment_says_so(self, proxy, asks, monkeypatch, excepted):
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", excepted)
        with pytest.raises(UnavailableError, match=r"NameResolutionError|NewConnectionError"):
            asks("https://cluster.invalid:8443", user={"token": "t"})
        assert proxy.asked == []

    def test_a_kind_that_the_client_does_not_know(self, tmp_path):
        path = write(
            tmp_path / "config",
            "https://cluster.invalid",
            cluster={"proxy-url": "gopher://u:secret@127.0.0.1:1"},
            user={"token": "t"},
        )
        with (
            EKSExecutor("image", kubeconfig=path, retry_timeout=0) as executor,
            pytest.raises(AuthError, match="ProxySchemeUnknown") as error,
        ):
            executor.list_runs()
        assert "secret" not in str(error.value)

    def test_https_has_its_own(self, proxy, asks, monkeypatch):
        """Of the two variables the client takes the other one."""
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        for name, address in (("HTTPS_PROXY", proxy.url), ("https_proxy", proxy.url[7:])):
            monkeypatch.setenv(name, address)
            with pytest.raises(UnavailableError, match="Tunnel connection failed: 501"):
                asks("https://cluster.invalid:8443", user={"token": "t"})


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
        with (
            EKSExecutor("image") as executor,
            pytest.raises(AuthError, match="has no context None"),
        ):
            executor.list_runs()

    def test_a_proxy_that_has_no_address(self, asks):
        with pytest.raises(AuthError, match="no cluster can be reached as") as error:
            asks(
                "https://cluster.invalid",
                cluster={"proxy-url": "http://u:pw@127.0.0.1:port"},
                user={"token": "t"},
            )
        assert "pw" not in str(error.value)

    def test_paths_begin_at_the_files_folder(self, server, tmp_path, monkeypatch):
        (tmp_path / "team").mkdir()
        (tmp_path / "team" / "secret").write_text("sesamopenyou")
        path = write(tmp_path / "team" / "config", server.url, user={"tokenFile": "secret"})
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("KUBECONFIG", str(path.relative_to(tmp_path)))
        with EKSExecutor("image") as executor:
            executor.list_runs()
        assert server.asked[0][2]["Authorization"] == "Bearer sesamopenyou"

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

    def test_a_plugin_is_told_of_the_cluster_if_it_asks(self, server, asks, tmp_path):
        (tmp_path / "ca.pem").write_text("trusted")
        program = """
import json, os
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
authority = info["spec"]["cluster"]["certificate-authority-data"]
status = {"token": authority + os.environ["MORE"] + str(info["spec"]["interactive"])}
print(json.dumps({**info, "status": status}))
"""
        user = self.plugin(program, provideClusterInfo=True, env=[{"name": "MORE", "value": "-"}])
        asks(server.url, user=user, cluster={"certificate-authority": "ca.pem"})
        authority = base64.b64encode(b"trusted").decode()
        assert server.asked[0][2]["Authorization"] == f"Bearer {authority}-False"

    @pytest.mark.parametrize("end", ["0001-01-01T00:00:00+14:00", "soon", 5])
    def test_an_end_of_them_that_no_clock_reaches(self, server, asks, end):
        answer = {"status": {"token": "x", "expirationTimestamp": end}}
        with pytest.raises(AuthError, match="gave no credentials that can be used"):
            asks(server.url, user=self.plugin(f"print({json.dumps(json.dumps(answer))})"))
        assert server.asked == []

    @pytest.mark.parametrize(
        ("program", "why"),
        [
            ("exit(1)", "exit code 1"),
            ("print('{')", "its answer is not JSON"),
            ("print('[]')", "exit code 0"),
            ('print(\'{"status": {"token": 5}}\')', "exit code 0"),
        ],
    )
    def test_without_any_nobody_goes_on_as_nobody(self, server, asks, program, why):
        user = self.plugin(program, installHint="install it with care")
        with pytest.raises(AuthError, match=f"{why}.*install it with care"):
            asks(server.url, user=user)
        assert server.asked == []

    def test_a_plugin_that_is_not_installed(self, server, asks):
        with pytest.raises(AuthError, match="No such file"):
            asks(server.url, user=self.plugin("", command="no-such-plugin"))
        assert server.asked == []

    def test_a_user_that_no_file_has(self, server, tmp_path, monkeypatch):
        path = write(tmp_path / "config", server.url)
        path.write_text(path.read_text().replace('"user": "one"', '"user": "two"'))
        with (
            EKSExecutor("image", kubeconfig=path, retry_timeout=0) as executor,
            pytest.raises(AuthError, match="has no user 'two'"),
        ):
            executor.list_runs()
        assert server.asked == []

    V1 = "client.authentication.k8s.io/v1"

    @pytest.mark.parametrize(
        ("user", "match"),
        [
            ({"username": "u", "password": "p"}, "has 'password' and 'username', which is not"),
            ({"auth-provider": {"name": "x"}}, "has 'auth-provider', which is not obeyed"),
            ({"token": "t", "tokenFile": "f"}, "has token and tokenFile: leave one"),
            ({"token": "t", "exec": {"apiVersion": V1, "command": "x"}}, "has token and exec"),
            ({"client-key": "k", "client-key-data": "eA=="}, "has client-key and client-key-data"),
            ({"exec": {"command": "x"}}, "exec.apiVersion must be text, not nothing"),
            ({"exec": {}}, "exec.apiVersion must be text, not nothing"),
        ],
    )
    def test_what_is_not_read_alike(self, server, asks, user, match):
        with pytest.raises(AuthError, match=f"the kubeconfig's user 'one'.* ?{match}"):
            asks(server.url, user=user)
        assert server.asked == []

    @pytest.mark.parametrize(
        ("cluster", "match"),
        [
            ({"insecure-skip-tls-verify": True, "certificate-authority": "f"}, "has certificate"),
            ({"certificate-authority-data": "eA==", "certificate-authority": "f"}, "has certif"),
            *(
                ({"server": server}, "must be an address that begins with https://")
                for server in (
                    "127.0.0.1:80",
                    "user:hunter2pw@127.0.0.1:80",
                    "https://user:hunter2pw@127.0.0.1:80",
                    "HTTPS://127.0.0.1:80",
                    "https:127.0.0.1:80",
                    "https://127.0.0.1:80/?a=b",
                    "http://cluster.invalid:8080",
                    "http://127.0.0.1.invalid",
                    "http://localhost@cluster.invalid",
                )
            ),
            ({"server": "http://localhost:1", "proxy-url": "http://p"}, "must be an address"),
            ({"server": ""}, "must be an address"),
        ],
    )
    def test_clusters_that_are_not_read_alike_or_in_clear(self, tmp_path, cluster, match):
        path = write(tmp_path / "config", "https://127.0.0.1:9", cluster=cluster)
        with pytest.raises(AuthError, match=f"the kubeconfig's cluster 'one'.* ?{match}") as error:
            read_kubeconfig(path, None)
        assert "hunter2" not in str(error.value)

    def test_a_context_without_a_user(self, tmp_path):
        path = write(tmp_path / "config", "https://127.0.0.1:9")
        path.write_text(path.read_text().replace(', "user": "one"', ""))
        with pytest.raises(AuthError, match="has no user None"):
            read_kubeconfig(path, None)

    def test_what_changes_nothing_is_ignored(self, server, asks):
        asks(server.url, cluster={"extensions": [{"name": "x"}], "disable-compression": True})
        assert len(server.asked) == 1

    def test_only_what_the_context_names_is_looked_at(self, server, tmp_path):
        path = write(tmp_path / "config", server.url)
        config = json.loads(path.read_text())
        config["users"].append({"name": "other", "user": {"auth-provider": {"name": "gcp"}}})
        path.write_text(json.dumps(config))
        with EKSExecutor("image", kubeconfig=path) as executor:
            executor.list_runs()

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
            with pytest.raises(InvalidRequestError, match="a token with a line end") as error:
                asks(server.url, user={"token": token})
            assert "openyou" not in "".join(traceback.format_exception(error.value))
        assert server.asked == []

    def test_what_a_plugin_says_is_told_short_and_without_secrets(self, server, asks):
        said = "login with --password hunter2 failed \\x1b[2J " + "x" * 5000
        program = f"import sys; print('{said}', file=sys.stderr); exit(1)"
        with pytest.raises(AuthError, match="gave no credentials") as error:
            asks(server.url, user=self.plugin(program))
        assert r"--password <redacted> failed \x1b[2J xxx" in str(error.value)
        assert len(str(error.value)) < 800

    def test_credentials_that_have_expired_are_asked_for_anew(self, server, tmp_path):
        answer = {"status": {"token": "x", "expirationTimestamp": "2020-01-01T00:00:00Z"}}
        said = tmp_path / "said"  # a program that fails once this is there
        program = (
            "import os, sys\n"
            f"if os.path.exists({str(said)!r}): sys.exit('login with --password hunter2 failed')\n"
            f"print({json.dumps(json.dumps(answer))})"
        )
        path = write(tmp_path / "config", server.url, user=self.plugin(program))
        with EKSExecutor("image", kubeconfig=path, retry_timeout=0) as executor:
            executor.list_runs()
            said.touch()
            with pytest.raises(AuthError, match="--password <redacted> failed") as error:
                executor.list_runs()
            assert error.value.retryable
            said.unlink()
            executor.list_runs()
        assert len(server.asked) == 2


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
                pytest.raises((AuthError, InvalidRequestError), match=match) as error,
            ):
                executor.list_runs()
            assert not error.value.retryable
            told = "".join(traceback.format_exception(error.value))
            assert "openyou" not in told.replace(str(tmp_path), "")
            assert server.asked == []

        return refused

    @pytest.mark.parametrize("name", ["5", "on", "2026-11-26", "0x1f", "~", "[a]"])
    def test_names(self, server, refused, name):
        match = "must be text, not .*Put text in quotes"
        if name != "~":
            refused(yaml(server.url, current=name), f"current-context {match}")
        refused(yaml(server.url, context=name), rf"contexts\[0\].name {match}")
        for kind in ("user", "cluster"):
            text = yaml(server.url, **{kind: name})
            refused(text, rf"({kind}s\[0\].name|the kubeconfig's context 'c'.{kind}) {match}")
            quoted = text.replace(f"{kind}: {name}", f"{kind}: 'x'")
            refused(quoted, rf"{kind}s\[0\].name {match}")

    def test_quotes_help(self, server, tmp_path):
        text = yaml(server.url, current="'5'", context="'5'", user="'7'", cluster="'on'")
        (tmp_path / "config").write_text(text)
        with EKSExecutor("image", kubeconfig=tmp_path / "config") as executor:
            executor.list_runs()
        assert server.asked[0][2]["Authorization"] == "Bearer sesamopenyou"

    @pytest.mark.parametrize(
        ("inside", "match"),
        [
            (("context", "namespace: 123"), "the namespace of the kubeconfig's context"),
            (("cluster", "proxy-url: 8080"), "cluster 'k'.proxy-url must be text"),
            (("cluster", "insecure-skip-tls-verify: 'false'"), "must be true or false"),
            (("user", "tokenFile: 9"), "user 'u'.tokenFile must be text, not a whole number"),
            (("user", "exec: {apiVersion: a, command: x, args: openyou}"), "must be a list, not"),
            (("user", "exec: openyou"), "exec must be a mapping"),
            (
                ("user", "exec: {apiVersion: a, command: x, env: [{name: A, value: 5}]}"),
                "value must be text",
            ),
            (
                ("user", "exec: {apiVersion: a, command: x, env: [{name: A}]}"),
                "value must be text, not nothing",
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
            ("[sesamopenyou]", "its content must be a mapping, not a list"),
            ("users:\n- name: u\n  token: [sesamopenyou", "cannot be read, line "),
            ("a: sesamopenyou\n---\nb: 1", "cannot be read, line 2"),
            ("[" * 5000, "cannot be read: RecursionError"),
            ("a: 2026-13-45\nb: sesamopenyou", "cannot be read: ValueError"),
            ("a: !!bool sesamopenyou", "cannot be read: KeyError"),
            ("a: !!int ''\nb: sesamopenyou", "cannot be read: IndexError"),
            ("a: !!timestamp sesamopenyou", "cannot be read: AttributeError"),
        ],
    )
    def test_damage(self, refused, text, match):
        refused(text, match)

    @pytest.mark.parametrize("line", ["kind: Pod", "kind: 5", "apiVersion: v2", "apiVersion: 1"])
    def test_a_file_of_another_kind(self, server, refused, line):
        field = line.partition(":")[0]
        refused(yaml(server.url) + line, f"the {field} of the kubeconfig .* must be (Config|v1)")

    def test_a_file_that_says_its_kind(self, server, tmp_path):
        (tmp_path / "config").write_text(yaml(server.url) + "kind: Config\napiVersion: v1\n")
        with EKSExecutor("image", kubeconfig=tmp_path / "config") as executor:
            executor.list_runs()
        assert len(server.asked) == 1

    def test_a_cluster_without_a_server(self, server, refused):
        text = yaml(server.url).replace(f'server: "{server.url}", ', "")
        refused(text, "cluster 'k'.server must be text, not nothing")

    def test_what_is_no_utf_8(self, tmp_path):
        (tmp_path / "config").write_bytes(b"# \xe9\n" + yaml("http://127.0.0.1:1").encode())
        with pytest.raises(AuthError, match="cannot be read: UnicodeDecodeError"):
            EKSExecutor("image", kubeconfig=tmp_path / "config").list_runs()
