"""The state that belongs to one replica alone: inner optimizers, random generators, and what the user adds to it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from .._checks import kind_of
from .._errors import ConfigurationError, CorruptedObjectError, FormatError
from .._wire._safetensors import (
    LENGTH_BYTES,
    MOST_HEADER_BYTES,
    entry,
    header_bytes,
    parse_header,
)
from .._wire._sealed import FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .._store._api import Buffer

_CHECKSUM_BYTES = 8
# Integers with more bits are written as hexadecimal text, since Python refuses to read and write thousands of decimal digits.
_DECIMAL_BITS = 1024
_CHECKSUM = "xxh3"
_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


# Fields of a saved file that are not states of objects.
_OTHER_FIELDS = {"random", "inner_steps", "rollback", "kinds", "parameters"}


class Stateful(Protocol):
    """Anything whose position can be saved: a data loader, a learning rate schedule, a gradient scaler.

    It is saved inside the inner optimizer's ``step()`` where a sync follows, and again where the block is left. If a replica is
    killed, what the loop changed after that ``step()`` is not in the save: a ``schedule.step()`` or ``scaler.update()`` there is
    lost. At the beginning of each step, ``while schedule.last_epoch < outer.inner_steps: schedule.step()`` takes the schedule to
    where it belongs.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, made of numbers, text, lists, dicts and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Continue from a saved state."""
        ...


@dataclass(frozen=True, slots=True)
class SavedInner:
    """An inner state in the store.

    Attributes:
        sync: The sync in the run's log after which it was saved.
        identity: The run and the key that it belongs to.
        origin: What it is called in errors.
        data: The bytes of the file, which are not verified yet.
    """

    sync: int
    identity: str
    origin: str
    data: bytes = field(repr=False)

    def rollback(self) -> int:
        """Number of the newest rollback that was in the log when the state was saved.

        Raises:
            CorruptedObjectError: The file is damaged.
            FormatError: Another version of diloco-core has written the file.
        """
        return int(_description(self.data, self.identity, self.origin)["rollback"])


class InnerState:
    """Saves and restores the state that belongs to one replica alone, as a safetensors file with a checksum, without pickle.

    Args:
        optimizers: The inner optimizers.
        stateful: Further objects whose state is saved, by name.
        names: Names of the model's parameters, by ``id``. Optimizers know their parameters only by number; the names make
            sure that a state is restored to the same parameters. None if this is not to be checked.
        own: Objects of the outer loop itself whose state is saved with theirs, by name.

    Attributes:
        overwritten: Settings of optimizers that the last :meth:`restore` has replaced with saved ones, as text.
        scheduled: Whether one of these optimizers has a learning rate scheduler, which sets its learning rate anyway.
    """

    def __init__(
        self,
        optimizers: Sequence[Stateful],
        stateful: Mapping[str, Stateful],
        names: Mapping[int, str] | None = None,
        own: Mapping[str, Stateful] | None = None,
    ) -> None:
        for name, holder in stateful.items():
            if not callable(getattr(holder, "state_dict", None)) or not callable(
                getattr(holder, "load_state_dict", None)
            ):
                raise ConfigurationError(
                    f"stateful[{name!r}] is {kind_of(holder)}, which cannot be saved: pass an object with state_dict() and "
                    "load_state_dict()"
                )
        self._names = names
        self._own_names = frozenset(own or {})  # no concern of the user's
        self.overwritten: list[str] = []
        self.scheduled = False
        several = len(optimizers) > 1
        self._holders: dict[str, Stateful] = {
            **{
                f"optimizer.{number}" if several else "optimizer": optimizer
                for number, optimizer in enumerate(optimizers)
            },
            **{f"stateful.{name}": holder for name, holder in stateful.items()},
            **(own or {}),
        }

    def _kinds(self) -> dict[str, str]:
        return {name: type(holder).__name__ for name, holder in self._holders.items()}

    def _parameters(self) -> dict[str, list[list[str]]]:
        """Names of the parameters of every optimizer, group by group."""
        if self._names is None:
            return {}
        return {
            name: [
                [self._names.get(id(p), "") for p in group["params"]]
                for group in holder.param_groups
            ]
            for name, holder in self._holders.items()
            if isinstance(holder, torch.optim.Optimizer) and not name.startswith("stateful.")
        }

    def try_out(self) -> None:
        """Check that everything can be saved as it is now, and read again. Values of tensors are not copied.

        Raises:
            ConfigurationError: Something cannot be saved; the error names it.
        """
        for name, state in self._tree([]).items():
            try:
                size = len(json.dumps(json.dumps(state)))
                json.loads(json.dumps(state))
            except (ValueError, RecursionError) as error:
                raise ConfigurationError(
                    f"{name} ({type(self._holders[name]).__name__}) cannot be saved as JSON: {type(error).__name__}: {error}"
                ) from error
            if size > MOST_HEADER_BYTES // 2:
                raise ConfigurationError(
                    _too_large(f"{name} ({type(self._holders[name]).__name__})", size)
                )

    def _tree(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """All states in a form that JSON can hold. Tensors are appended to a list, and take the form of their number in it."""
        tree: dict[str, Any] = {}
        for name, holder in self._holders.items():
            try:
                tree[name] = _pack(holder.state_dict(), tensors, name)
            except ConfigurationError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"{name} ({type(holder).__name__}) cannot be saved: {type(error).__name__}: {error}"
                ) from error
        return tree

    def parts(self, inner_steps: int, identity: str, rollback: int = 0) -> Iterator[Buffer]:
        """The bytes of the file. One tensor at a time is copied to the CPU.

        Args:
            inner_steps: The number of inner steps taken when it is saved.
            identity: The run and the key that the file will belong to.
            rollback: Number of the newest rollback in the run's log.

        Raises:
            ConfigurationError: A state holds something other than numbers, text, lists, dicts and tensors.
        """
        tensors: list[torch.Tensor] = []
        tree = self._tree(tensors)
        tree["random"] = _pack(_random_state(), tensors, "random")
        tree["inner_steps"] = inner_steps
        tree["rollback"] = rollback
        tree["kinds"] = self._kinds()
        tree["parameters"] = self._parameters()
        metadata = {"diloco": "inner", "format": str(FORMAT), "tree": json.dumps(tree)}
        entries: dict[str, object] = {}
        offset = 0
        for number, tensor in enumerate(tensors):
            end = offset + tensor.numel() * tensor.itemsize
            entries[str(number)] = entry(tensor.dtype, tensor.shape, offset, end)
            offset = end
        entries[_CHECKSUM] = entry(torch.uint8, [8], offset, offset + _CHECKSUM_BYTES)
        beginning = header_bytes(entries, metadata)
        if len(beginning) > MOST_HEADER_BYTES:
            raise ConfigurationError(
                _too_large("the inner optimizer together with stateful=", len(beginning))
            )
        checksum = xxhash.xxh3_64(beginning, seed=_seed(identity))
        yield beginning
        for tensor in tensors:
            data = _bytes(tensor)
            checksum.update(data)
            yield data
        yield checksum.intdigest().to_bytes(_CHECKSUM_BYTES, "little")

    def restore(self, data: bytes, identity: str, origin: str) -> int:
        """Load a saved state that belongs to ``identity``. Returns the number of inner steps at which it was saved.

        Raises:
            CorruptedObjectError: The file is damaged.
            FormatError: Another version of diloco-core has written the file.
            ConfigurationError: It was saved with other names in ``stateful``, or with objects of other classes, or of other
                parameters; or an object refuses its saved state.
        """
        tree, tensors = _verified(data, identity, origin)
        saved_names, present_names = tree.keys() - _OTHER_FIELDS, self._holders.keys()
        if saved_names != present_names:
            raise ConfigurationError(
                f"the inner state in {origin} was saved with {sorted(saved_names - self._own_names)}, but this replica has "
                f"{sorted(present_names - self._own_names)}: pass the same inner optimizers and the same stateful= as before"
            )
        if tree["kinds"] != self._kinds():
            raise ConfigurationError(
                f"the inner state in {origin} was saved with other classes than this replica has: "
                f"{_differences(tree['kinds'], self._kinds())}. Pass objects of the same classes, or begin another run."
            )
        for name, groups in self._parameters().items():
            if tree["parameters"].get(name) != groups:
                raise ConfigurationError(
                    f"the inner state in {origin} was saved when {name} held other parameters, or held them in another order or "
                    "in other groups: give it the same parameters as before, in the same order and groups"
                )
        self.overwritten, self.scheduled = [], False
        for name, holder in self._holders.items():
            given_settings = _settings(holder)
            try:
                holder.load_state_dict(_unpack(tree[name], tensors))
            except Exception as error:
                raise ConfigurationError(
                    f"{name} ({type(holder).__name__}) refuses the state that is saved in {origin}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            pairs = zip(given_settings, _settings(holder), strict=False)
            for number, (before, now) in enumerate(pairs):
                changed = [key for key in before if key in now and before[key] != now[key]]
                self.overwritten += [
                    f"{name} group {number}: {k}={now[k]} (not {before[k]})" for k in changed
                ]
                self.scheduled |= "initial_lr" in before
        _set_random_state(_unpack(tree["random"], tensors))
        return int(tree["inner_steps"])


def _differences(saved: Mapping[str, str], present: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name} was {saved.get(name)} and is {kind}"
        for name, kind in present.items()
        if saved.get(name) != kind
    )


def _settings(holder: Stateful) -> list[dict[str, str]]:
    """The settings of an optimizer, group by group; empty for other objects."""
    groups = holder.param_groups if isinstance(holder, torch.optim.Optimizer) else []
    return [
        {key: repr(value) for key, value in group.items() if key != "params"} for group in groups
    ]


def _too_large(name: str, size: int) -> str:
    return (
        f"the state of {name} takes {size} bytes besides its tensors, which is too much: a file that can be read again has at "
        f"most {MOST_HEADER_BYTES} bytes of this. Let state_dict() return long lists of numbers as tensors."
    )


def check_inner(data: bytes, identity: str, origin: str) -> None:
    """Verify the checksum of a file. It covers all other bytes of the file, and its seed is made from the run and the key.

    Raises:
        CorruptedObjectError: The file is damaged.
    """
    body, ending = memoryview(data)[:-_CHECKSUM_BYTES], memoryview(data)[-_CHECKSUM_BYTES:]
    stored = int.from_bytes(ending, "little")
    if (
        len(data) < LENGTH_BYTES + _CHECKSUM_BYTES
        or xxhash.xxh3_64_intdigest(body, seed=_seed(identity)) != stored
    ):
        raise CorruptedObjectError(
            f"{origin}: the checksum is wrong. The saved inner state is damaged, or it was written under another key or in "
            "another run."
        )


def _seed(identity: str) -> int:
    return xxhash.xxh3_64_intdigest(identity.encode())


def _verified(
    data: bytes, identity: str, origin: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The states in a file, in the form of :func:`_pack`, and its tensors by name."""
    tree = _description(data, identity, origin)
    try:
        return tree, load_tensors(data)
    except SafetensorError as error:
        raise CorruptedObjectError(
            f"{origin} is not the inner state of a replica: {error}"
        ) from error


def _description(data: bytes, identity: str, origin: str) -> dict[str, Any]:
    """The states in a file, in the form of :func:`_pack`. All bytes are verified before anything is parsed."""
    check_inner(data, identity, origin)
    body = memoryview(data)[:-_CHECKSUM_BYTES]
    try:
        metadata = parse_header(body)["__metadata__"]
        file_format = metadata.get("format", "of an earlier version")
        if file_format != str(FORMAT):
            raise FormatError(
                f"{origin} has format {file_format}, and this version of diloco-core reads format {FORMAT} only: use the version "
                "that the run was begun with"
            )
        tree: dict[str, Any] = json.loads(metadata["tree"])
        if (
            not isinstance(tree["kinds"], dict)
            or not isinstance(tree["parameters"], dict)
            or not all(isinstance(tree[name], int) for name in ("inner_steps", "rollback"))
            or "random" not in tree
        ):
            raise TypeError("its metadata are incomplete")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptedObjectError(
            f"{origin} is not the inner state of a replica: {error}"
        ) from error
    return tree


def _random_state() -> dict[str, Any]:
    python = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [
            str(kind),
            [int(key) for key in keys],
            int(position),
            int(has_gauss),
            float(gauss),
        ],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _pack(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """A value in a form that JSON can hold. Tensors are appended to a list, and take the form of their number in it."""
    if isinstance(value, int) and value.bit_length() > _DECIMAL_BITS:
        return {"int": hex(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        if value.dtype not in _DTYPES:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _DTYPES))
            raise ConfigurationError(
                f"{where} is a tensor of {value.dtype}, which cannot be saved. These dtypes can: {known}."
            )
        if (
            type(value.detach()) is not torch.Tensor
            or value.layout is not torch.strided
            or value.is_meta
        ):
            raise ConfigurationError(
                f"{where} is {kind_of(value.detach())} ({value.layout}, on {value.device}), which cannot be saved: only plain, "
                "dense tensors can"
            )
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {
            kind: [_pack(item, tensors, f"{where}[{number}]") for number, item in enumerate(value)]
        }
    if isinstance(value, dict):
        return {
            "dict": [
                [_pack(k, tensors, where), _pack(v, tensors, _entry(where, k))]
                for k, v in value.items()
            ]
        }
    raise ConfigurationError(
        f"{where} is {kind_of(value)}, which cannot be saved: only numbers, text, lists, tuples, dicts and tensors can"
    )


def _entry(where: str, key: object) -> str:
    # Python refuses to print an integer with thousands of decimal digits.
    return f"{where}[{hex(key) if isinstance(key, int) and key.bit_length() > _DECIMAL_BITS else repr(key)}]"


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[str(content)]
    if kind == "int":
        return int(content, 16)
    if kind == "dict":
        return {_unpack(key, tensors): _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
