"""The suite calls executors through ``within`` alone, which notices hangs and forbidden errors."""

import ast
from pathlib import Path

import pytest

import diloco_conformance
from diloco_protocol import BaseExecutor

VERBS = {name for name in dir(BaseExecutor) if not name.startswith("_")} - {"options"}
#: Functions that are handed to ``within``, or read in a thread that is watched itself.
LATER = {"_launch", "_read", "_follow"}
SOURCES = sorted(Path(diloco_conformance.__file__).parent.glob("*.py"))


def direct_calls(source):
    """The lines on which an executor is called at once.

    A lambda, a partial and a function within a function are called later.
    """
    found = []

    def look(node, *, later, depth):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not later:
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name == "executor" and node.func.attr in VERBS:
                found.append(f"{node.lineno}: {node.func.attr}")
        is_function = isinstance(node, ast.FunctionDef)
        later |= isinstance(node, ast.Lambda)
        later |= is_function and (depth > 0 or node.name in LATER)
        for child in ast.iter_child_nodes(node):
            look(child, later=later, depth=depth + is_function)

    look(ast.parse(source), later=False, depth=0)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_executors_are_called_by_way_of_within(path):
    assert not direct_calls(path.read_text(encoding="utf-8"))


def test_a_direct_call_is_noticed():
    source = """
def test(lab, executor):
    lab.executor.poll(1)
    executor.close()
    lab.within("S4", lambda: lab.executor.poll(1))
    lab.within("S4", executor.close)
    def later():
        lab.executor.poll(1)
    lab.executor.capabilities.replace()
"""
    assert direct_calls(source) == ["3: poll", "4: close"]
