"""Taking a model out of a run's store, without any replica."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from .._arithmetic._layout import Group, Layout, Piece, Rule
from .._checks import is_whole
from .._elastic._log._keys import commit_key
from .._errors import ConfigurationError, CorruptedObjectError, ObjectNotFoundError, RendezvousError
from .._store._ahead import open_ahead
from .._store._drivers._folder import FolderStore
from .._store._open import open_store
from .._store._reread import read_again
from .._timing import Timing
from .._wire._published import ValuesReader
from .._wire._sections import Section
from ._source import lacking, state, states
from ._sources import find_source, sentence, unsynced_files, without_unsynced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .._store._api import ObjectReader, Store
    from ._source import PublishedFile, Source

_TRIES = 8
_TIMING = Timing()

T = TypeVar("T")

_log = logging.getLogger("diloco_core")


def export(
    uri: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    at: int | None = None,
    synced_only: bool = False,
) -> int:
    """Write the model that a run's store holds to a safetensors file, so that a strict ``load_state_dict`` takes it.

    The file has an entry for every entry of the model's ``state_dict()``: tied tensors under all of their names, without the
    names of wrappers (``torch.compile``, ``DistributedDataParallel``, ``DataParallel``). What was not synced (frozen
    parameters, and buffers under ``buffers="none"``) is as it was when the run began, at the replica that began it. What a
    file of tensors cannot hold (the extra state of modules, what hooks add) is left out, and named in a warning.

    Without ``at`` it is the newest state whose values are whole; a run that goes on meanwhile is not disturbed. If the values
    of a newer one are damaged, or something of it is not there, a warning in the log says which, and so do ``damaged`` and
    ``incomplete`` in the file's metadata. Only what the file takes is read and verified: damage in the headers of shards and
    in the outer optimizer's state does not show here. A run that is resumed finds it and mends it.

    What was committed but not published when an elastic run stopped is taken by the first replica that resumes it.

    Args:
        uri: The run's prefix; for a folder also a path.
        path: The file to write; replaced in one step.
        dtype: Dtype of floating-point tensors; that of the model if left out (the store holds at least float32).
        synced_only: Leave out what was not synced, and do not read it: the way on where the store has lost that, and nobody is
            left to write it again. Load the file with ``strict=False`` into a model that has the rest from elsewhere.
        at: After how many outer steps (``DiLoCo.committed``); the store keeps the last few states only. Where the run has gone
            back to older states, those that it gave up are passed over.

    Returns:
        After how many outer steps the state is (0: the initial state).

    Raises:
        RendezvousError: There is no run, or one without a model, or it has not published one yet, or not the state ``at``.
        CorruptedObjectError: The store does not hold what its records promise: the state ``at`` is damaged or incomplete, or
            all are, or the manifest is, or what was not synced; it says what to do.
        StoreUnavailableError: The store cannot be listed and read; it need not be writable.
        ConfigurationError: ``dtype`` is no floating-point dtype or cannot hold a value of the model, ``at`` is not a number of
            outer steps, or ``path`` cannot be written or lies in the run's own folder. Its folder must exist.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(f"dtype must be a floating-point dtype, not {dtype!r}")
    if at is not None and (not is_whole(at) or at < 0):
        raise ConfigurationError(f"at must be a number of outer steps, 0 or more, not {at!r}")
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError(f"path must be the name of a file, not {path!r}")
    if not isinstance(uri, (str, os.PathLike)):
        raise ConfigurationError(f"uri must be the run's prefix, as text or a path, not {uri!r}")
    if not isinstance(synced_only, bool):
        raise ConfigurationError(f"synced_only must be True or False, not {synced_only!r}")
    target = Path(path)
    with _replacing(target) as temporary:
        store = open_store(os.fspath(uri), reading=True)
        if isinstance(store, FolderStore) and target.resolve().is_relative_to(store.root.resolve()):
            raise _unwritable(
                target, "it lies in the run's own folder, where only the run's objects belong"
            )
        try:
            source = _again(lambda: find_source(store))
            choice, tensors = _newest_whole(store, source, dtype, at)
            step = choice.step
            unfinished = _unfinished(source, choice)
            if not synced_only:
                try:
                    tensors.update(_read(store, source.unsynced, unsynced_files(source), dtype))
                except (ObjectNotFoundError, CorruptedObjectError) as error:
                    raise CorruptedObjectError(
                        f"{sentence(_corrupted(error))} {without_unsynced(source)}"
                    ) from error
        finally:
            store.close()
        aliases = source.unsynced.get("aliases", {})
        tensors.update(
            {alias: tensors[name].clone() for alias, name in aliases.items() if name in tensors}
        )
        metadata = {"run_id": source.run_id, "sync": str(step), "format": "pt"}
        if choice.damaged:
            metadata["damaged"] = ", ".join(map(str, choice.damaged))
            _log.warning(
                "%s in %s cannot be used: %s This is the state after outer step %d.",
                _the_states(choice.damaged),
                store.uri,
                " ".join(map(sentence, choice.errors)),
                step,
            )
        if unfinished is not None:
            metadata["incomplete"] = str(unfinished.step)
            _log.warning(
                "%s in %s is incomplete: %s This is the state after outer step %d.",
                _the_states([unfinished.step]),
                store.uri,
                unfinished.why,
                step,
            )
        if omitted := source.unsynced.get("omitted"):
            _log.warning(
                "entries of the model's state_dict() that %s does not hold: %s",
                target,
                ", ".join(omitted),
            )
        try:
            save_file(tensors, temporary, metadata)
            temporary.replace(target)
        except (SafetensorError, OSError) as error:
            raise _unwritable(target, str(error)) from error
    return step


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new file beside ``target``, made at once: what cannot be written is known before anything is read."""
    if target.is_dir():
        raise _unwritable(target, "it is a folder")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise _unwritable(target, error.strerror or str(error)) from error
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _unwritable(target: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{str(target)!r} cannot be written: {why}. Name a file in a folder that exists, that this user may write, and that "
        "has room."
    )


class _Choice(NamedTuple):
    """The state that is read.

    Attributes:
        number: Its number in the log.
        step: After how many outer steps it is.
        damaged: For every newer state that is damaged, the number of outer steps after which it was saved; the newest first.
        errors: The errors of these states.
        incomplete: Numbers in the log of newer states that are incomplete; the newest first.
    """

    number: int
    step: int
    damaged: list[int]
    errors: list[CorruptedObjectError]
    incomplete: list[int]


class _Unfinished(NamedTuple):
    """A state of which something is not there: after how many outer steps it is, and what to say of it."""

    step: int
    why: str


def _newest_whole(
    store: Store, source: Source, dtype: torch.dtype | None, at: int | None
) -> tuple[_Choice, dict[str, torch.Tensor]]:
    """A state and its values; the run may go on while it is read."""
    damaged: dict[tuple[int, int], CorruptedObjectError] = {}
    vanished = 0
    while vanished < _TRIES:
        choice = _choose(store, source, at, damaged)
        tensors: dict[str, torch.Tensor] = {}
        for index, own in enumerate(state(source, choice.number)):
            try:
                tensors.update(
                    _read(store, source.fragments[index], source.files(index, own), dtype)
                )
            except (ObjectNotFoundError, CorruptedObjectError) as error:
                # The run has gone on and collected it (its space may be written over while it is read), or it is damaged.
                if own in source.complete()[index]:
                    damaged[index, own] = _corrupted(error)
                else:
                    vanished += 1
                break
        else:
            return choice, tensors
    raise CorruptedObjectError(
        f"the published state in {store.uri} kept vanishing while it was read"
    )


def _unfinished(source: Source, choice: _Choice) -> _Unfinished | None:
    """The newest state of which something was not there, if that is still so: a run that goes on is through with it soon."""
    if not choice.incomplete or max(states(source, source.complete())) >= choice.incomplete[0]:
        return None
    return _why(source, choice.incomplete[0])


def _why(source: Source, number: int) -> _Unfinished | None:
    keys = lacking(source, number)
    if not keys:
        return None
    first, *others = keys
    what = (
        f"{first} is not there"
        if not others
        else f"{first} is not there, nor are {len(others)} other objects of it"
    )
    if len(others) == 1:
        what = f"{first} is not there, nor is {others[0]}"
    return _Unfinished(
        source.outer_steps(number),
        f"{what}. A replica may be about to write that; if none is running, the run ended before it was written, or something "
        "has deleted it.",
    )


def _again(read: Callable[[], T]) -> T:
    """What fails its checksum is read again before it counts as damaged: twice, since somebody is waiting."""
    return read_again(_TIMING, read, most=2)


def _corrupted(error: ObjectNotFoundError | CorruptedObjectError) -> CorruptedObjectError:
    if isinstance(error, CorruptedObjectError):
        return error
    return CorruptedObjectError(f"an object that the run's records name is gone: {error}")


def _choose(
    store: Store,
    source: Source,
    at: int | None,
    damaged: Mapping[tuple[int, int], CorruptedObjectError],
) -> _Choice:
    """The newest state, or the one that is asked for."""
    numbers = states(source, _again(source.complete))
    steps = {number: source.outer_steps(number) for number in numbers}
    whole = [
        number
        for number in numbers
        if not any(part in damaged for part in enumerate(state(source, number)))
    ]
    wanted = [number for number in whole if at in {None, steps[number]}]
    if wanted and at is not None:
        return _Choice(wanted[0], at, [], [], [])
    newest = max(whole, default=-1)
    incomplete = [number for number in source.expected() if number > newest and number not in steps]
    if wanted:
        newer = [steps[number] for number in numbers if number > newest]
        return _Choice(newest, steps[newest], newer, list(damaged.values()), incomplete)
    held = f"Complete states in {store.uri}: {_listed([steps[number] for number in whole])}."
    if damaged and (at is None or at in steps.values()):
        error = next(iter(damaged.values()))
        raise CorruptedObjectError(f"{sentence(error)} {held}") from error
    for number in incomplete:
        unfinished = _why(source, number) if at in {None, source.outer_steps(number)} else None
        if unfinished is not None and number > source.first:
            raise CorruptedObjectError(
                f"{_the_states([unfinished.step])} in {store.uri} is incomplete: {unfinished.why} {held}"
            )
    if source.unknown:
        raise CorruptedObjectError(
            f"{store.uri}/{commit_key(source.unknown)} is damaged or gone. It is the record with which the run went back to "
            "older states: without it, those of before cannot be told from what was given up, and are not exported. Start the "
            f"replicas again: they write what can be made again, and newer states have no need of it. {held}"
        )
    if at is not None:
        raise RendezvousError(
            f"{store.uri} does not hold the state after outer step {at}. It holds: {_listed(list(steps.values()))}. "
            "A run keeps its newest states only."
        )
    raise RendezvousError(
        f"the run at {store.uri} has not published a whole model yet: try again later"
    )


def _the_states(steps: list[int]) -> str:
    *others, last = map(str, sorted(steps))
    if not others:
        return f"the state after outer step {last}"
    return f"the states after outer steps {', '.join(others)} and {last}"


def _listed(steps: list[int]) -> str:
    return "after outer steps " + ", ".join(map(str, sorted(steps))) if steps else "none"


def _read(
    store: Store, table: Mapping[str, Any], files: list[PublishedFile], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """The tensors of some files, verified. Each is tried again before it counts as damaged."""
    if not files:
        return {}
    layout = Layout(tuple(map(_group, table["groups"])), table["shards"])
    flat = [torch.empty(group.numel, dtype=group.dtype, device="cpu") for group in layout.groups]
    numbers = {file.key: number for number, file in enumerate(files)}
    listing: dict[str, int] = {}
    for folder in sorted({file.key.rpartition("/")[0] for file in files}):
        listing.update(store.list(f"{folder}/"))

    def announce(key: str, reader: ObjectReader) -> None:
        _values(store, layout, numbers[key], files[numbers[key]], reader)

    with open_ahead(store, {key: listing.get(key) for key in numbers}, announce) as readers:
        for number, (file, opened) in enumerate(zip(files, readers, strict=True)):
            _read_file(store, layout, flat, number, file, opened)
    return {entry["name"]: _tensor(flat, entry, dtype) for entry in table["tensors"]}


def _read_file(
    store: Store,
    layout: Layout,
    flat: list[torch.Tensor],
    number: int,
    file: PublishedFile,
    opened: ObjectReader | None,
) -> None:
    """Read a file into place, again where it is not as it was written; ``opened`` is of use for the first reading only."""

    def read() -> None:
        nonlocal opened
        reader, opened = opened or store.open(file.key), None
        with reader:
            values = _values(store, layout, number, file, reader)
            for piece in layout.shard(number):
                values.read(_part(flat, piece))
            checksum = values.verify().values
        if file.checksum not in {None, checksum}:
            raise CorruptedObjectError(
                f"{store.uri}/{file.key} is not what the record of its sync says"
            )

    _again(read)


def _values(
    store: Store, layout: Layout, number: int, file: PublishedFile, reader: ObjectReader
) -> ValuesReader:
    """A reader of a file's values, which are announced with it."""
    section = Section("values", layout.shard(number), file.seed)
    return ValuesReader(reader, layout, section, f"{store.uri}/{file.key}")


def _tensor(
    flat: list[torch.Tensor], entry: Mapping[str, Any], dtype: torch.dtype | None
) -> torch.Tensor:
    shape, start, group = torch.Size(entry["shape"]), int(entry["start"]), int(entry["group"])
    values = flat[group][start : start + shape.numel()].view(shape)
    own = _dtype(entry["dtype"])
    if dtype is None or not own.is_floating_point:
        return values.to(own, copy=True)
    largest = torch.finfo(dtype).max
    too_large = values.isfinite() & (values.abs() > largest)
    if bool(too_large.any()):
        raise ConfigurationError(
            f"dtype={dtype} cannot hold the values of {entry['name']!r}: they go up to {values[too_large].abs().max():.6g}, and "
            f"it holds up to {largest:.6g}. Leave dtype out ({own} then), or take one with a larger range."
        )
    return values.to(dtype, copy=True)


def _part(flat: list[torch.Tensor], piece: Piece) -> torch.Tensor:
    return flat[piece.group][piece.start : piece.stop]


def _group(entry: Mapping[str, Any]) -> Group:
    return Group(_dtype(entry["dtype"]), entry["numel"], Rule(entry["rule"]))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptedObjectError(
            f"the manifest names the dtype {name!r}, which torch does not know"
        )
    return dtype
