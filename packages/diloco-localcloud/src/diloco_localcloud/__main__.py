"""Run a stand-in until Ctrl-C: ``diloco-localcloud kubernetes``, ``aws`` or ``modal``."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import KubernetesProcesses, ModalProcesses, SageMakerProcesses, StandInError

_MOST_SECONDS = 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stand-in that the arguments name.

    Returns:
        The exit code: 0 after Ctrl-C or SIGTERM, 1 if the stand-in could not start (argparse exits
        with 2 for wrong arguments).
    """
    options = _parser().parse_args(arguments)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    try:
        with tempfile.TemporaryDirectory(prefix="stand-in-") as folder:
            options.run(options, Path(folder), over)
    except StandInError as wrong:
        sys.stderr.write(f"{wrong}\n")
        return 1
    return 0


def _kubernetes(options: argparse.Namespace, folder: Path, over: threading.Event) -> None:
    with KubernetesProcesses(
        port=options.port,
        namespace=options.namespace,
        resources=dict(text.split("=", 1) for text in options.resource),
        backoff_seconds=options.backoff_seconds,
    ) as stand_in:
        path = stand_in.kubeconfig(options.kubeconfig or folder / "kubeconfig")
        _show({"KUBECONFIG": str(path)}, stand_in.url)
        over.wait()


def _aws(options: argparse.Namespace, _: Path, over: threading.Event) -> None:
    with SageMakerProcesses(port=options.port, region=options.region) as stand_in:
        for name in options.bucket:
            stand_in.create_bucket(name)
        _show(stand_in.environment, stand_in.url)
        over.wait()


def _modal(options: argparse.Namespace, _: Path, over: threading.Event) -> None:
    with ModalProcesses(port=options.port) as stand_in:
        _show(stand_in.environment, stand_in.url)
        over.wait()


def _show(environment: Mapping[str, str], url: str) -> None:
    for name, value in environment.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    sys.stdout.write(f"# {url} runs; Ctrl-C ends it and all that it has started\n")
    sys.stdout.flush()


def _text(pattern: str, words: str) -> Callable[[str], str]:
    """Return the type of an argument that has to match a pattern."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
        return text

    return check


_BUCKET = _text(
    r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
    "the name of a bucket: 3 to 63 lower-case letters, digits, dots and dashes",
)
_REGION = _text(r"[a-z0-9]+(-[a-z0-9]+)+", "the name of a region, such as eu-west-1")
_RESOURCE = _text(r"(?s)[^=]+=.+", "of the form NAME=AMOUNT, such as nvidia.com/gpu=8")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from 0 to {_MOST_SECONDS:g}"
        )
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diloco-localcloud",
        description="Run a stand-in of a cloud until Ctrl-C.",
        epilog="It runs no file of the folder in which it is started. "
        "With python -m diloco_localcloud Python itself may: "
        "start it as python -P -m diloco_localcloud then. Nothing helps if PYTHONPATH names that "
        "folder, as an empty element of it does.",
    )
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    words = "a Kubernetes API whose pods are processes of this machine"
    kube = kinds.add_parser("kubernetes", help=words)
    words = "where to write the kubeconfig; by default a file that goes at the end"
    kube.add_argument("--kubeconfig", metavar="FILE", help=words)
    words = "namespace of the kubeconfig, made if need be"
    kube.add_argument("--namespace", default="default", help=words)
    several: dict[str, Any] = {"action": "append", "default": []}
    words = "what the node declares as well"
    kube.add_argument("--resource", type=_RESOURCE, metavar="NAME=AMOUNT", help=words, **several)
    words = "first wait before a failed pod is replaced (default: 10)"
    kube.add_argument("--backoff-seconds", type=_seconds, default=10.0, help=words)
    words = "SageMaker, CloudWatch Logs, S3 and STS; training jobs are processes of this machine"
    aws = kinds.add_parser("aws", help=words)
    words = "of AWS (default: us-east-1)"
    aws.add_argument("--region", type=_REGION, default="us-east-1", help=words)
    words = "a bucket that there is from the beginning; may be given several times"
    aws.add_argument("--bucket", type=_BUCKET, metavar="NAME", help=words, **several)
    words = "Modal; functions that are called run as processes of this machine"
    modal = kinds.add_parser("modal", help=words)
    for kind, run in ((kube, _kubernetes), (aws, _aws), (modal, _modal)):
        kind.set_defaults(run=run)
        words = "port on 127.0.0.1; 0 (the default) for a free one"
        kind.add_argument("--port", type=int, default=0, help=words)
    return parser


if __name__ == "__main__":
    sys.exit(main())
