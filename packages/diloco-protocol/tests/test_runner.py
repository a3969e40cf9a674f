"""The runner, with real processes: it is truthful about every end, and leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from runner_lab import MODULE, PATIENCE, end, replica

from diloco_protocol import Outcome, Reason, ReplicaSpec, entrypoint_name, spec_to_arguments

__all__ = ["replica"]

pytestmark = pytest.mark.processes


@pytest.fixture
def package(tmp_path):
    """A package with modules that an entrypoint may name."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from . import seen\ndef both(**kwargs): return 'function'\n"
    )
    for name in ("seen", "unseen", "both"):
        (folder / f"{name}.py").write_text(f"def main(**kwargs): return ['{name}', kwargs]\n")
    (folder / "broken.py").write_text("import no_such_module\n")
    (folder / "empty.py").touch()


class TestOutcomes:
    @pytest.mark.parametrize(("function", "code"), [("returns", 0), ("leaves", 5)])
    def test_an_interpreter_that_is_told_to_stay(self, replica, tmp_path, function, code):
        """With PYTHONINSPECT, Python takes a program's exit code for a mistake, and ends with 1."""
        around = {"PYTHONINSPECT": "1"}
        outcome = end(replica(function, around=around, code=code), tmp_path)
        assert (outcome.exit_code, outcome.result) == (code, None if code else {"code": 0})

    @pytest.mark.sampled
    @pytest.mark.parametrize("through", ["file", "environment", "arguments"])
    def test_kwargs_and_result_arrive_exactly(self, replica, tmp_path, through):
        kwargs = {"a": [1, 1.0, True, None, {"b": "$(X) é\n'\""}], "none": None}
        outcome = end(replica("returns", through=through, **kwargs), tmp_path)
        assert (outcome.exit_code, outcome.reason, outcome.error) == (0, Reason.COMPLETED, None)
        assert json.dumps(outcome.result) == json.dumps(kwargs)
        assert outcome.started_at <= outcome.finished_at

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("name", "result"),
        [("seen", ["seen", {"a": 1}]), ("unseen", ["unseen", {"a": 1}]), ("both", "function")],
    )
    def test_a_module_may_be_named(self, replica, package, tmp_path, name, result):
        entry = entrypoint_name(f"package.{name}")
        assert end(replica("", entry=entry, a=1), tmp_path).result == result

    @pytest.mark.parametrize(
        ("more", "inner"), [({}, None), ({"world_size_env": "WORLD_SIZE"}, "4")]
    )
    def test_the_replica_knows_who_it_is(self, replica, tmp_path, monkeypatch, more, inner):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        assert end(replica("environment", rank=3, **more), tmp_path).result == {
            "REPLICA_RANK": "3",
            "REPLICA_WORLD_SIZE": "4",
            "RENDEZVOUS_URI": "/tmp/somewhere",
            "DILOCO_RUN_ID": "a-run",
            "DILOCO_ATTEMPT": "2",
            "MY_RANK": "3",
            "WORLD_SIZE": inner,
        }

    @pytest.mark.parametrize("through", ["file", "environment"])
    def test_nothing_of_a_run_around_it_shines_through(self, replica, tmp_path, through):
        around = (
            {"RENDEZVOUS_URI": "/other", "DILOCO_RUN_ID": "other", "DILOCO_SPEC_7": "x"}
            if through == "file"
            else {}
        )
        seen = end(replica("sees", through=through, around=around), tmp_path).result
        assert seen == {
            "RENDEZVOUS_URI": "/tmp/somewhere",
            "DILOCO_RUN_ID": "a-run",
            "DILOCO_COHORT": "a-run",
            "DILOCO_ATTEMPT": "2",
        }

    def test_a_replica_is_as_light_as_its_entrypoint(self, replica, tmp_path):
        heavy = {
            "torch",
            "numpy",
            "asyncio",
            "multiprocessing",
            "importlib.metadata",
            "logging",
            "ctypes",
            "argparse",
        }
        assert not heavy & set(end(replica("imported"), tmp_path).result)

    def test_it_may_change_its_folder(self, tmp_path):
        (tmp_path / "entry.py").write_text(MODULE)
        (tmp_path / "spec.json").write_text(
            ReplicaSpec("entry:moves", {"folder": "/"}, 0, 1).to_json()
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        }
        command = [
            sys.executable,
            "-m",
            "diloco_protocol.runner",
            "--spec",
            "spec.json",
            "--outcome",
            "outcome.json",
        ]
        subprocess.run(command, cwd=tmp_path, env=environment, timeout=PATIENCE, check=True)
        assert Outcome.from_json((tmp_path / "outcome.json").read_text()).result == "/"
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
            "entry.py",
            "outcome.json",
            "spec.json",
        ]

    @pytest.mark.parametrize(("options", "exit_code"), [([], 0), (["-P"], 1)])
    def test_its_folder_is_a_place_for_modules_unless_the_runner_was_kept_from_it(
        self, tmp_path, options, exit_code
    ):
        """A launcher starts the runner with -P because anyone may have put modules there."""
        (tmp_path / "lying_here.py").write_text("def main(): return 'found'")
        (tmp_path / "spec.json").write_text(ReplicaSpec("lying_here:main", {}, 0, 1).to_json())
        where = ["--spec", "spec.json", "--outcome", "outcome.json"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run(
            [sys.executable, *options, "-m", "diloco_protocol.runner", *where],
            cwd=tmp_path,
            env=environment,
            timeout=PATIENCE,
            check=False,
        )
        outcome = Outcome.from_json((tmp_path / "outcome.json").read_text())
        assert outcome.exit_code == exit_code
        assert outcome.result == ("found" if exit_code == 0 else None)

    def test_it_may_start_processes_of_its_own(self, replica, tmp_path):
        assert end(replica("in_a_pool"), tmp_path).result == 3

    def test_a_large_result(self, replica, tmp_path):
        assert len(end(replica("large", megabytes=16), tmp_path).result) == 16 * 10**6
        outcome = end(replica("large", megabytes=17), tmp_path)
        assert (outcome.exit_code, outcome.error_type) == (79, "InvalidResult")
        assert "the result is 17000002 bytes of JSON" in outcome.error

    def test_a_dotted_name(self, replica, tmp_path):
        assert end(replica("Space.inner"), tmp_path).result == "inner"

    def test_a_result_that_is_not_json_is_a_failure_that_says_so(self, replica, tmp_path):
        outcome = end(replica("not_json"), tmp_path)
        assert outcome.exit_code == 79, "it would return the same again"
        assert "result.model[1] is a builtins.object" in outcome.error

    def test_an_exception(self, replica, tmp_path):
        runner = replica("raises")
        outcome = end(runner, tmp_path)
        assert (outcome.exit_code, outcome.reason, outcome.error_type) == (
            1,
            Reason.ERROR,
            "ValueError",
        )
        assert outcome.error == "ValueError: no such data"
        assert 'raise ValueError("no such data")' in outcome.traceback
        assert "no such data" in runner.err

    def test_a_traceback_begins_with_the_users_own_lines(self, replica, tmp_path):
        outcome = end(replica("calls"), tmp_path)
        functions = re.findall(r"File .*, in (\w+)", outcome.traceback)
        assert functions == ["stays", "hides", "raises"]

    def test_who_was_replaced_says_so_by_its_exit_code(self, replica, tmp_path):
        outcome = end(replica("is_replaced"), tmp_path)
        assert (outcome.exit_code, outcome.reason, outcome.error_type) == (
            79,
            Reason.ERROR,
            "Fenced",
        )

    def test_an_exception_that_quotes_what_cannot_be_sent(self, replica, tmp_path):
        """Half of a surrogate pair, as Python makes it of a file's name that is not UTF-8."""
        outcome = end(replica("raises_half_a_pair"), tmp_path)
        assert (outcome.error, outcome.error_type) == (
            "ValueError: no file data-\\udce9",
            "ValueError",
        )
        assert outcome.traceback.endswith("no file data-\\udce9\n")

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        "text",
        [
            *("", "{", "[" * 10**5, '{"version": 2}', "\\ud800", " " * 2**25),
            Outcome(3, error="no").to_json().replace(':"error"', ':"preempted"'),
        ],
        ids=range(7),
    )
    def test_a_report_that_no_runner_could_read_is_a_failure(self, replica, tmp_path, text):
        outcome = end(replica("forges_its_report", text=text), tmp_path)
        assert (outcome.exit_code, outcome.error_type) == (1, "InvalidReport")
        assert "reported cannot be read" in outcome.error

    def test_what_was_reported_as_a_failure_is_no_success(self, replica, tmp_path):
        text = Outcome(3, error="gave up", reason=Reason.ERROR).to_json()
        outcome = end(replica("forges_its_report", text=text), tmp_path)
        assert (outcome.exit_code, outcome.error) == (3, "gave up")

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("code", "exit_code", "error"),
        [
            (None, 0, None),
            (0, 0, None),
            (3, 3, "code 3"),
            (-1, 255, "code 255"),
            (256, 0, None),
            (2**40, 0, None),
            (10**30, 255, "code 255"),
            (-(10**30), 255, "code 255"),
            ("gave up", 1, "gave up"),
        ],
    )
    def test_exits(self, replica, tmp_path, code, exit_code, error):
        outcome = end(replica("leaves", code=code), tmp_path)
        assert outcome.exit_code == exit_code
        assert (outcome.reason is Reason.COMPLETED) == (exit_code == 0)
        assert error is None or error in outcome.error

    @pytest.mark.sampled
    @pytest.mark.parametrize("streams", ["closed", "gone"])
    @pytest.mark.parametrize(
        ("how", "error", "error_type"),
        [
            ("exception", "ValueError: why", "ValueError"),
            ("exit", "the entrypoint exited: why", "SystemExit"),
            ("unshowable", "Unshowable: <str() failed>", "Unshowable"),
            ("result", "the entrypoint entry:without_streams returned something", "InvalidResult"),
        ],
    )
    def test_what_has_failed_is_told_without_streams_and_texts(
        self, replica, tmp_path, streams, how, error, error_type
    ):
        outcome = end(replica("without_streams", streams=streams, how=how), tmp_path)
        code = 79 if how == "result" else 1
        assert (outcome.exit_code, outcome.error_type) == (code, error_type)
        assert outcome.error.startswith(error)
        assert (outcome.traceback is None) == (how in {"exit", "result"})

    def test_limits_that_the_entrypoint_has_set_do_not_cost_its_result(self, replica, tmp_path):
        assert end(replica("sets_limits"), tmp_path).result == [10**2000, [[[[[[[[[[[[]]]]]]]]]]]]]

    @pytest.mark.parametrize("code", [0, 3])
    def test_exits_without_a_word(self, replica, tmp_path, code):
        outcome = end(replica("drops", code=code), tmp_path)
        assert (outcome.exit_code, outcome.result) == (code, None)
        assert code == 0 or "exited with code 3" in outcome.error

    @pytest.mark.sampled
    @pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGTERM"])
    def test_signals_are_named(self, replica, tmp_path, name):
        number = getattr(signal, name)
        outcome = end(replica("crashes", number=int(number)), tmp_path)
        assert (outcome.exit_code, outcome.signal, outcome.reason) == (
            128 + number,
            name,
            Reason.ERROR,
        )
        assert name in outcome.error

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("entry", "told"),
        [
            ("no_such_module:f", "importing module 'no_such_module' failed: ModuleNotFoundError"),
            ("entry:no_such_function", "looking up 'no_such_function' in module 'entry' failed"),
            ("package:none", "looking up 'none' in module 'package' failed: AttributeError"),
            ("package:empty", "looking up 'main' in module 'package.empty' failed"),
            ("package:broken", "No module named 'no_such_module'"),
        ],
    )
    def test_what_cannot_be_found_is_named(self, replica, package, tmp_path, entry, told):
        outcome = end(replica("", entry=entry), tmp_path)
        assert outcome.reason is Reason.START_FAILED
        assert told in outcome.error


class TestWrongSpecs:
    def run(self, *arguments, **variables):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **variables,
        }
        command = [sys.executable, "-m", "diloco_protocol.runner", *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    def test_another_version_is_refused_by_name(self, tmp_path):
        later = ReplicaSpec("m:f", {}, 0, 1).to_json().replace('"version":4', '"version":7')
        (tmp_path / "spec.json").write_text(later)
        done = self.run(
            "--spec", str(tmp_path / "spec.json"), "--outcome", str(tmp_path / "outcome.json")
        )
        assert done.returncode == 2
        assert "version 7" in done.stderr
        outcome = Outcome.from_json((tmp_path / "outcome.json").read_text())
        assert (outcome.reason, outcome.error_type) == (Reason.START_FAILED, "SpecVersionError")

    def test_no_spec(self):
        done = self.run()
        assert done.returncode == 2
        assert "no replica spec in the environment" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("where", ["none/outcome.json", "file/outcome.json"])
    def test_nothing_is_started_whose_outcome_could_not_be_written(self, tmp_path, where):
        (tmp_path / "file").touch()
        (tmp_path / "entry.py").write_text(
            f"def f(): open({str(tmp_path / 'started')!r}, 'w').close()\n"
        )
        (tmp_path / "spec.json").write_text(ReplicaSpec("entry:f", {}, 0, 1).to_json())
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        done = self.run(
            "--spec",
            str(tmp_path / "spec.json"),
            "--outcome",
            str(tmp_path / where),
            PYTHONPATH=path,
        )
        assert done.returncode == 2
        assert "the outcome cannot be written" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "started").exists()

    def test_an_incomplete_spec_in_the_arguments(self):
        pieces = spec_to_arguments(ReplicaSpec("m:f", {"a": "x" * 1000}, 0, 1))
        done = self.run(*pieces[1:])
        assert done.returncode == 2
        assert "incomplete replica spec" in done.stderr

    def test_no_such_file(self, tmp_path):
        done = self.run("--spec", str(tmp_path / "none.json"))
        assert done.returncode == 2
        assert "none.json" in done.stderr
