"""Writing the model in a run's store to a file, without any replica."""

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
from ._source import missing_keys, state, states
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
    """Write the model that a run's store holds to a safetensors file. A strict ``load_state_dict`` accepts it.

    The file has an entry for every entry of the model's ``state_dict()``: tied tensors under all of their names, and without
    the names of wrappers (``torch.compile``, ``DistributedDataParallel``, ``DataParallel``). Tensors that were not synced
    (frozen parameters, and buffers under ``buffers="none"``) are as they were when the run began, at the replica that began
    it. Entries that a file of tensors cannot hold (the extra state of modules, what hooks add) are left out, and a warning
    names them.

    Without ``at``, the file holds the newest state whose values are whole. A run that is going on is not disturbed. If the
    values of a newer state are damaged, or some of its objects are missing, a warning in the log says which, and so do
    ``damaged`` and ``incomplete`` in the file's metadata. Only what the file needs is read and verified, so damage in the
    headers of shards and in the outer optimizer's state is not noticed. A run that is resumed finds and repairs it.

    Syncs that were committed but not published when an elastic run stopped are not in the file. The first replica that resumes
    the run completes them.

    Args:
        uri: The run's prefix; for a folder also a path.
        path: The file to write; replaced in one step.
        dtype: Dtype of floating-point tensors; that of the model if left out (the store holds at least float32).
        synced_only: Leave out the tensors that were not synced, and do not read them: for a store that has lost them when no
            replica is left to write them again. Load the file with ``strict=False`` into a model that has them from elsewhere.
        at: The number of outer steps (``DiLoCo.committed``) after which the state was saved; the store keeps only the last few
            states. If the run has gone back to older states, those that it gave up are not used.

    Returns:
        The number of outer steps after which the state was saved (0: the initial state).

    Raises:
        RendezvousError: There is no run, or one without a model, or it has not published one yet, or not the state ``at``.
        CorruptedObjectError: The store does not hold what its records promise. The state ``at`` is damaged or incomplete, or
            all states are, or the manifest, or the tensors that were not synced. The error says what to do.
        StoreUnavailableError: The store cannot be listed and read; it need not be writable.
        ConfigurationError: ``dtype`` is not a floating-point dtype or cannot hold a value of the model, ``at`` is not a number
            of outer steps, or ``path`` cannot be written or lies in the run's own folder. Its folder must exist.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(
            f"dtype must be a floating-point dtype such as torch.float32, not {dtype!r}"
        )
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
                target, "it is in the run's own folder, where only the run's objects belong"
            )
        try:
            source = _reading_again(lambda: find_source(store))
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
                "%s in %s cannot be used: %s The file holds the state after outer step %d.",
                _the_states(choice.damaged),
                store.uri,
                " ".join(map(sentence, choice.errors)),
                step,
            )
        if unfinished is not None:
            metadata["incomplete"] = str(unfinished.step)
            _log.warning(
                "%s in %s is incomplete: %s The file holds the state after outer step %d.",
                _the_states([unfinished.step]),
                store.uri,
                unfinished.reason,
                step,
            )
        if omitted := source.unsynced.get("omitted"):
            _log.warning(
                "%s does not hold these entries of the model's state_dict(), which are not tensors of the model: %s",
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
    """A new file beside ``target``. It is made at once, so that an error of writing shows before anything is read."""
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


def _unwritable(target: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{str(target)!r} cannot be written: {reason}. Use a path in a folder that exists, that this user may write to, and "
        "that has room."
    )


class _Choice(NamedTuple):
    """The state that is chosen.

    Attributes:
        number: Its number in the log.
        step: The number of outer steps after which it was saved.
        damaged: For each newer state that is damaged, the number of outer steps after which it was saved; the newest first.
        errors: The errors of these states.
        incomplete: Numbers in the log of newer states that are incomplete; the newest first.
    """

    number: int
    step: int
    damaged: list[int]
    errors: list[CorruptedObjectError]
    incomplete: list[int]


class _Unfinished(NamedTuple):
    """A state with missing objects: the number of outer steps after which it was saved, and what messages say of it."""

    step: int
    reason: str


def _newest_whole(
    store: Store, source: Source, dtype: torch.dtype | None, at: int | None
) -> tuple[_Choice, dict[str, torch.Tensor]]:
    """Choose a state and read its values. The run may go on in the meantime."""
    damaged: dict[tuple[int, int], CorruptedObjectError] = {}
    vanished = 0
    while vanished < _TRIES:
        choice = _choose(store, source, at, damaged)
        tensors: dict[str, torch.Tensor] = {}
        for index, sync in enumerate(state(source, choice.number)):
            try:
                tensors.update(
                    _read(store, source.fragments[index], source.files(index, sync), dtype)
                )
            except (ObjectNotFoundError, CorruptedObjectError) as error:
                # Either the object is damaged, or the run has gone on and deleted it. Its space may have been written over
                # while it was read.
                if sync in source.complete()[index]:
                    damaged[index, sync] = _corrupted(error)
                else:
                    vanished += 1
                break
        else:
            return choice, tensors
    raise CorruptedObjectError(
        f"the published states in {store.uri} were deleted while they were read, {_TRIES} times: the run is going on faster than "
        "it can be read from here. Try again, or from a machine closer to the store."
    )


def _unfinished(source: Source, choice: _Choice) -> _Unfinished | None:
    """The newest incomplete state, if it is still incomplete: if the run is going on, it is complete by now."""
    if not choice.incomplete or max(states(source, source.complete())) >= choice.incomplete[0]:
        return None
    return _unfinished_state(source, choice.incomplete[0])


def _unfinished_state(source: Source, number: int) -> _Unfinished | None:
    keys = missing_keys(source, number)
    if not keys:
        return None
    first_key, *other_keys = keys
    missing = f"{first_key} is missing"
    if len(other_keys) == 1:
        missing = f"{first_key} and {other_keys[0]} are missing"
    elif other_keys:
        missing = f"{first_key} and {len(other_keys)} other objects are missing"
    return _Unfinished(
        source.outer_steps(number),
        f"{missing}. If the run is going on, a replica may be about to write what is missing; if no replica is running, the run "
        "ended before it was written, or something has deleted it.",
    )


def _reading_again(read: Callable[[], T]) -> T:
    """Like :func:`read_again`, but with only two further readings, since a person is waiting."""
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
    """The state ``at``; without that, the newest one that is whole."""
    numbers = states(source, _reading_again(source.complete))
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
    complete_states = (
        f"Complete states in {store.uri}: {_listed([steps[number] for number in whole])}."
    )
    if damaged and (at is None or at in steps.values()):
        error = next(iter(damaged.values()))
        raise CorruptedObjectError(f"{sentence(error)} {complete_states}") from error
    for number in incomplete:
        is_wanted = at in {None, source.outer_steps(number)}
        unfinished = _unfinished_state(source, number) if is_wanted else None
        if unfinished is not None and number > source.initial_steps:
            raise CorruptedObjectError(
                f"{_the_states([unfinished.step])} in {store.uri} is incomplete: {unfinished.reason} {complete_states}"
            )
    if source.unknown:
        raise CorruptedObjectError(
            f"{store.uri}/{commit_key(source.unknown)} is damaged or gone. It is the record with which the run went back to "
            "older states. Without it, it is not known which of the states before it were given up, so none of them is "
            "exported. Start the replicas again: they write again what can be written again, and newer states do not need this "
            f"record. {complete_states}"
        )
    if at is not None:
        present = f"the states {_listed(list(steps.values()))}" if steps else "no complete state"
        raise RendezvousError(
            f"{store.uri} does not hold the state after outer step {at}. It holds {present}. A run keeps only its newest states."
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
    """Read and verify the tensors in some files. Each file is read again before it counts as damaged."""
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
    """Read a file into its place in ``flat``, again if it is damaged; ``opened`` serves only the first reading."""

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
                f"{store.uri}/{file.key} does not have the checksum that the record of its sync says"
            )

    _reading_again(read)


def _values(
    store: Store, layout: Layout, number: int, file: PublishedFile, reader: ObjectReader
) -> ValuesReader:
    """A reader of a file's values. Making it announces what it will read."""
    section = Section("values", layout.shard(number), file.seed)
    return ValuesReader(reader, layout, section, f"{store.uri}/{file.key}")


def _tensor(
    flat: list[torch.Tensor], entry: Mapping[str, Any], dtype: torch.dtype | None
) -> torch.Tensor:
    shape, start, group = torch.Size(entry["shape"]), int(entry["start"]), int(entry["group"])
    values = flat[group][start : start + shape.numel()].view(shape)
    model_dtype = _dtype(entry["dtype"])
    if dtype is None or not model_dtype.is_floating_point:
        return values.to(model_dtype, copy=True)
    largest = torch.finfo(dtype).max
    too_large = values.isfinite() & (values.abs() > largest)
    if bool(too_large.any()):
        raise ConfigurationError(
            f"dtype={dtype} cannot hold the values of {entry['name']!r}: they go up to {values[too_large].abs().max():.6g}, "
            f"and it can hold up to {largest:.6g}. Leave dtype out (the file then has {model_dtype}), or pass one with a "
            "larger range."
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
            f"the manifest names the dtype {name!r}, which this version of torch does not know"
        )
    return dtype
