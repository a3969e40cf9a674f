"""Takes the folder in which ``python -m diloco_localcloud`` starts off the path.

It is imported before anything else. Python puts that folder first, so that a file ``json.py`` in it
would be run by mistake. This is no protection against hostile files: the modules that Python
imports to find this package (``importlib``, ``warnings`` and more) are looked for there before this
module runs; ``python -P`` prevents that. This module itself imports only modules that Python has
loaded or built in; ``from __future__ import annotations`` would look for a file, too.
"""

import sys

# While this package is imported for -m, argv[0] is "-m"; orig_argv then has the name of the module
# in the same place, counted from the end.
_named = sys.orig_argv[-len(sys.argv)].removeprefix("-m") if sys.argv[:1] == ["-m"] else ""
if _named.partition(".")[0] == __package__ and not sys.flags.safe_path:
    del sys.path[0]
