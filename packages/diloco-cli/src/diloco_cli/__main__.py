"""Runs the command as ``python -m diloco_cli``."""

from ._app import main

if __name__ == "__main__":
    main()
