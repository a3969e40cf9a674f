"""No package has a decoder that runs code, but for those that are named here with a reason."""

import ast
import re
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
RUNS_CODE = re.compile(
    r"_?pickle\.(?!dumps?$|PickleError$|PicklingError$)\w+"
    r"|(marshal|shelve|dill|cloudpickle|jsonpickle|joblib|pandas)(\.\w+)*"
    r"|multiprocessing(\.\w+)*\.(Client|Listener|Pipe|Queue|SimpleQueue|Manager|Pool)"
    r"|torch(\.\w+)*\.(load|jit\.load|hub\.load\w*)|torch\.distributed\.\w*_object(_list)?"
    r"|numpy\.(load|lib\.format\.read_array)"
    r"|yaml\.(?!safe_load(_all)?$)\w*load(_all)?"
    r"|eval|exec"
)
GATHER = "torch.distributed.all_gather_object"
ALLOWED = {
    ("diloco-core/src/diloco_core/_exchange/_process_group.py", GATHER): (
        "messages between the replicas of a process group, which SECURITY.md names as trusted"
    ),
    ("diloco-core/src/diloco_core/_processes/_inside.py", "pickle.loads"): (
        "messages between the processes of one replica, over torch's own group"
    ),
    ("diloco-core/src/diloco_core/_processes/_inside.py", GATHER): (
        "the same messages, where they are long"
    ),
    ("diloco-core/src/diloco_core/_processes/_moves.py", "pickle.loads"): (
        "what this process has pickled in the same line, to see whether it can be sent"
    ),
    ("diloco-localcloud/src/diloco_localcloud/_modal/_hands.py", "pickle.loads"): (
        "the arguments of a call, in a test that looks at them; the docstring says so"
    ),
}


def names_in(source):
    """Return all names that a module uses, with the full names of what it imports."""
    tree = ast.parse(source)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                imported[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                imported[each.asname or each.name] = f"{node.module}.{each.name}"

    def full(node):
        if isinstance(node, ast.Attribute):
            return f"{full(node.value)}.{node.attr}"
        return imported.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    found = {full(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)}
    return found | set(imported.values())


# Whatever RUNS_CODE matches has one of these in it: most modules need not be parsed.
SIGNS = re.compile(
    r"pickle|marshal|shelve|dill|joblib|pandas|multiprocessing|yaml|_object|read_array"
    r"|\b(?:eval|exec|load)"
)


def decoders_in(source):
    if not SIGNS.search(source):
        return set()
    return {name for name in names_in(source) if RUNS_CODE.fullmatch(name)}


def test_nothing_unpickles_or_evaluates_foreign_bytes():
    found = {
        (file.relative_to(PACKAGES).as_posix(), name)
        for file in PACKAGES.glob("*/src/**/*.py")
        for name in decoders_in(file.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\nvalue = pickle.loads(data)",
        "from pickle import Unpickler as U\nU(file).load()",
        "def read():\n    import cloudpickle as c\n    return c.loads(data)",
        "import torch\ntorch.load(file)",
        "import torch.distributed as dist\ndist.broadcast_object_list(objects)",
        "import numpy as np\nnp.load(file, allow_pickle=True)",
        "import yaml\nread = yaml.load",
        "import marshal, shelve",
        "from multiprocessing.connection import Listener",
        "eval(text)",
        "exec(compile(text, '', 'exec'))",
    ],
)
def test_a_decoder_that_runs_code_is_noticed(source):
    assert decoders_in(source)


def test_what_runs_no_code_is_allowed():
    plain = "import pickle, yaml\npickle.dumps(1)\nyaml.safe_load('')\nmodel.eval()\njson.loads('')"
    assert not decoders_in(plain)
