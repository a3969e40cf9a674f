"""Whoever is told that a life has to start again tells its caller, up to the exchange."""

import ast
from pathlib import Path

import diloco_core

_ELASTIC = Path(diloco_core.__file__).parent / "_run"


def _telling(body):
    """Those of the functions in the body of a module or a class that may return it."""
    return {
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef) and "Reload" in ast.unparse(node.returns)
    }


def _methods(tree):
    return set().union(*(_telling(node.body) for node in tree.body if hasattr(node, "bases")))


def _is_told(function, tree, functions, methods):
    """Whether it is such a function, a method of this module, or a method of an object that is made here."""
    if isinstance(function, ast.Name):
        nodes = filter(lambda node: isinstance(node, ast.ImportFrom), tree.body)
        names = {alias.name for node in nodes for alias in node.names}
        return function.id in _telling(tree.body) | (functions & names)
    if ast.unparse(function.value) == "self":
        return function.attr in _methods(tree)
    made_here = (
        isinstance(function.value, ast.Call) or ast.unparse(function.value) == "publications"
    )
    return made_here and function.attr in methods


def test_no_reload_is_overlooked():
    """If nobody looked at it, the life would go on with a state that is not the run's."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in _ELASTIC.rglob("*.py")}
    functions = set().union(*(_telling(tree.body) for tree in trees.values()))
    methods = set().union(*map(_methods, trees.values()))
    assert {"look_back", "replay"} <= functions
    assert {"finish", "run", "_wait"} <= methods
    overlooked = [
        f"{path.relative_to(_ELASTIC)}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees.items()
        if path.name != "_publish.py"  # what it does after an upload never returns one
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and _is_told(node.value.func, tree, functions, methods)
    ]
    assert overlooked == []
