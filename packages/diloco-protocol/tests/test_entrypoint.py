"""What a replica runs is named so that another process can import it, or refused."""

import functools
import sys
import types

import pytest

from diloco_protocol import InvalidRequestError, entrypoint_name


def a_function():
    """One that can be named."""


class Holder:
    @staticmethod
    def static():
        """A function in a class can be named too."""

    @classmethod
    def of_class(cls):
        """As can a class method."""

    def bound(self):
        """But not a bound method."""


class TestEntrypoint:
    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ("module:function", "module:function"),
            ("package.module:function", "package.module:function"),
            ("package.module:Class.function", "package.module:Class.function"),
            ("package.module.function", "package.module:function"),
            ("package.py.function", "package.py:function"),
            ("py:main", "py:main"),
            ("py.main", "py:main"),
            ("module:py", "module:py"),
            (json_dumps := __import__("json").dumps, f"{json_dumps.__module__}:dumps"),
        ],
    )
    def test_names(self, given, name):
        assert entrypoint_name(given) == name

    def test_functions_of_a_module(self, monkeypatch):
        for function in (a_function, Holder.static, Holder.of_class):
            monkeypatch.setattr(getattr(function, "__func__", function), "__module__", "trainer")
        assert entrypoint_name(a_function) == "trainer:a_function"
        assert entrypoint_name(Holder.static) == "trainer:Holder.static"
        assert entrypoint_name(Holder.of_class) == "trainer:Holder.of_class"

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ("", "not of the form"),
            ("function", "not of the form"),
            ("a:b:c", "not of the form"),
            ("a b:c", "not of the form"),
            ("my-module:main", "not of the form"),
            *(
                (path, "names a file.*: write 'package.module:function', with dots")
                for path in (
                    "train.py",
                    "package.train.py",
                    "train.py:fn",
                    "train.py::fn",
                    "./package/train.py:fn",
                    "package/train",
                    "package\\train.py",
                    "/path/to/file.py:main",
                    "my-train.py",
                )
            ),
            ("1a:b", "not of the form"),
            ("__main__:train", "__main__"),
            (lambda: None, "lambda"),
            (functools.partial(a_function), "partial"),
            (Holder().bound, "bound to an object"),
            (7, "must be text or a function"),
        ],
    )
    def test_what_cannot_be_named_is_refused(self, given, told):
        with pytest.raises(InvalidRequestError, match=told):
            entrypoint_name(given)

    def test_a_function_that_an_import_would_not_find_is_refused(self, monkeypatch):
        module = types.ModuleType("trainer_of_today")
        monkeypatch.setitem(sys.modules, "trainer_of_today", module)
        monkeypatch.setattr(a_function, "__module__", "trainer_of_today")
        with pytest.raises(InvalidRequestError, match="something else"):
            entrypoint_name(a_function)
        module.a_function = functools.partial(a_function)
        with pytest.raises(InvalidRequestError, match="something else"):
            entrypoint_name(a_function)
        module.a_function = a_function
        assert entrypoint_name(a_function) == "trainer_of_today:a_function"

    def test_a_function_of_a_module_that_is_called_py(self, monkeypatch):
        monkeypatch.setattr(a_function, "__module__", "package.py")
        assert entrypoint_name(a_function) == "package.py:a_function"

    def test_a_nested_function_is_refused(self):
        def nested():
            """Not to be found by an import."""

        with pytest.raises(InvalidRequestError, match="inside a function"):
            entrypoint_name(nested)

    def test_a_function_of_main_is_refused(self):
        def main():
            """Pretends to be of __main__."""

        main.__module__, main.__qualname__ = "__main__", "main"
        with pytest.raises(InvalidRequestError, match="__main__"):
            entrypoint_name(main)
