"""What belongs to one replica alone: inner optimizer, random generators, and whatever else the user names."""

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
# Longer whole numbers are written as hexadecimal text: Python refuses to read and write thousands of decimal digits.
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


_NOT_THINGS = {"random", "inner_steps", "rollback", "kinds", "parameters"}


class Stateful(Protocol):
    """Anything whose position can be saved: a data loader, a learning rate schedule, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Its state: numbers, text, lists, dicts and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Go on from a state."""
        ...


@dataclass(frozen=True, slots=True)
class SavedInner:
    """An inner state in the store.

    Attributes:
        sync: After which sync in the run's log it was saved.
        identity: What it is bound to: its run and its key.
        origin: Its name for errors.
        data: The file; nothing of it has been verified.
    """

    sync: int
    identity: str
    origin: str
    data: bytes = field(repr=False)

    def rollback(self) -> int:
        """Number of the newest rollback in the log when it was saved.

        Raises:
            CorruptedObjectError: It is not what was written.
            FormatError: Another version has written it.
        """
        return int(_described(self.data, self.identity, self.origin)["rollback"])


class InnerState:
    """Saves and restores what a replica has to itself. No pickle: a valid safetensors file, checksummed.

    Args:
        optimizers: The inner optimizers.
        stateful: More things to save, by name.
        names: The model's parameters by ``id``: optimizers know theirs by number only, and a state must not be given to
            others. None where they are not compared.

    Attributes:
        overwritten: Settings of optimizers that the last :meth:`restore` has replaced by saved ones.
        scheduled: Whether a learning rate scheduler belongs to one of them, which sets some of these anyway.
    """

    def __init__(
        self,
        optimizers: Sequence[Stateful],
        stateful: Mapping[str, Stateful],
        names: Mapping[int, str] | None = None,
    ) -> None:
        for name, thing in stateful.items():
            if not callable(getattr(thing, "state_dict", None)) or not callable(
                getattr(thing, "load_state_dict", None)
            ):
                raise ConfigurationError(
                    f"stateful[{name!r}] is {kind_of(thing)} without state_dict() and load_state_dict()"
                )
        self._names = names
        self.overwritten: list[str] = []
        self.scheduled = False
        several = len(optimizers) > 1
        self._things: dict[str, Stateful] = {
            **{
                f"optimizer.{number}" if several else "optimizer": each
                for number, each in enumerate(optimizers)
            },
            **{f"stateful.{name}": thing for name, thing in stateful.items()},
        }

    def _kinds(self) -> dict[str, str]:
        return {name: type(thing).__name__ for name, thing in self._things.items()}

    def _parameters(self) -> dict[str, list[list[str]]]:
        """Names of the parameters of every optimizer, group by group."""
        if self._names is None:
            return {}
        return {
            name: [
                [self._names.get(id(p), "") for p in group["params"]]
                for group in thing.param_groups
            ]
            for name, thing in self._things.items()
            if isinstance(thing, torch.optim.Optimizer) and not name.startswith("stateful.")
        }

    def try_out(self) -> None:
        """See whether everything can be saved as it is now, and read again. No values of tensors are copied.

        Raises:
            ConfigurationError: It names what cannot be saved.
        """
        for name, state in self._tree([]).items():
            try:
                size = len(json.dumps(json.dumps(state)))
                json.loads(json.dumps(state))
            except (ValueError, RecursionError) as error:
                raise ConfigurationError(
                    f"{name} ({type(self._things[name]).__name__}) cannot be saved as JSON: {type(error).__name__}: {error}"
                ) from error
            if size > MOST_HEADER_BYTES // 2:
                raise ConfigurationError(
                    _too_much(f"{name} ({type(self._things[name]).__name__})", size)
                )

    def _tree(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """All states as JSON, in which tensors are numbers of entries."""
        tree: dict[str, Any] = {}
        for name, thing in self._things.items():
            try:
                tree[name] = _pack(thing.state_dict(), tensors, name)
            except ConfigurationError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"{name} ({type(thing).__name__}) cannot be saved: {type(error).__name__}: {error}"
                ) from error
        return tree

    def parts(self, inner_steps: int, identity: str, rollback: int = 0) -> Iterator[Buffer]:
        """The file. One tensor at a time is copied to the CPU.

        Args:
            inner_steps: The inner step at which it is saved.
            identity: What it is to be bound to: its run and its key.
            rollback: Number of the newest rollback in the run's log.

        Raises:
            ConfigurationError: A state holds something that is no number, text, list, dict or tensor.
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
                _too_much("the inner optimizer and what is in stateful=", len(beginning))
            )
        checksum = xxhash.xxh3_64(beginning, seed=_seed(identity))
        yield beginning
        for tensor in tensors:
            data = _bytes(tensor)
            checksum.update(data)
            yield data
        yield checksum.intdigest().to_bytes(_CHECKSUM_BYTES, "little")

    def restore(self, data: bytes, identity: str, origin: str) -> int:
        """Take over a state that was saved and is bound to ``identity``; returns at which inner step it was saved.

        Raises:
            CorruptedObjectError: It is not what was written.
            FormatError: Another version has written it.
            ConfigurationError: It was saved with other things in ``stateful``, or of another kind of optimizer.
        """
        tree, tensors = _verified(data, identity, origin)
        saved, here = tree.keys() - _NOT_THINGS, self._things.keys()
        if saved != here:
            raise ConfigurationError(
                f"the inner state in {origin} was saved with {sorted(saved)}, but this replica has {sorted(here)}: "
                "pass the same inner optimizers and the same stateful= as before"
            )
        if tree["kinds"] != self._kinds():
            raise ConfigurationError(
                f"the inner state in {origin} was saved of {tree['kinds']}, but this replica has {self._kinds()}: pass "
                "things of the same classes, or begin another run"
            )
        for name, groups in self._parameters().items():
            if tree["parameters"].get(name) != groups:
                raise ConfigurationError(
                    f"the inner state in {origin} was saved while {name} held other parameters, or the same in another order or "
                    "in other groups: make it of the same parameters as before, in the same order"
                )
        self.overwritten, self.scheduled = [], False
        for name, thing in self._things.items():
            given = _settings(thing)
            try:
                thing.load_state_dict(_unpack(tree[name], tensors))
            except Exception as error:
                raise ConfigurationError(
                    f"{name} ({type(thing).__name__}) does not take back the state that is saved in {origin}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            for number, (before, now) in enumerate(zip(given, _settings(thing), strict=False)):
                changed = [key for key in before if key in now and before[key] != now[key]]
                self.overwritten += [
                    f"{name} group {number}: {k}={now[k]} (not {before[k]})" for k in changed
                ]
                self.scheduled |= "initial_lr" in before
        _set_random_state(_unpack(tree["random"], tensors))
        return int(tree["inner_steps"])


def _settings(thing: Stateful) -> list[dict[str, str]]:
    """What an optimizer was made with, group by group; nothing of other things."""
    groups = thing.param_groups if isinstance(thing, torch.optim.Optimizer) else []
    return [
        {key: repr(value) for key, value in group.items() if key != "params"} for group in groups
    ]


def _too_much(what: str, size: int) -> str:
    return (
        f"{what} saves {size} bytes beside tensors, which is more than could be read again (a header of {MOST_HEADER_BYTES} "
        "bytes): let state_dict() hold long lists of numbers as tensors"
    )


def check_inner(data: bytes, identity: str, origin: str) -> None:
    """Compare the checksum of a file, which covers every other byte of it, and whose seed is made of its run and its key.

    Raises:
        CorruptedObjectError: It is not what was written.
    """
    body, end = memoryview(data)[:-_CHECKSUM_BYTES], memoryview(data)[-_CHECKSUM_BYTES:]
    stored = int.from_bytes(end, "little")
    if (
        len(data) < LENGTH_BYTES + _CHECKSUM_BYTES
        or xxhash.xxh3_64_intdigest(body, seed=_seed(identity)) != stored
    ):
        raise CorruptedObjectError(
            f"{origin}: the checksum is wrong. The saved inner state was damaged, or was written under another key or in another "
            "run."
        )


def _seed(identity: str) -> int:
    return xxhash.xxh3_64_intdigest(identity.encode())


def _verified(
    data: bytes, identity: str, origin: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a file says of the values, and its tensors."""
    tree = _described(data, identity, origin)
    try:
        return tree, load_tensors(data)
    except SafetensorError as error:
        raise CorruptedObjectError(
            f"{origin} is not the inner state of a replica: {error}"
        ) from error


def _described(data: bytes, identity: str, origin: str) -> dict[str, Any]:
    """What a file says of the values; nothing is parsed before every byte of it is verified."""
    check_inner(data, identity, origin)
    body = memoryview(data)[:-_CHECKSUM_BYTES]
    try:
        metadata = parse_header(body)["__metadata__"]
        written = metadata.get("format", "of an earlier version")
        if written != str(FORMAT):
            raise FormatError(
                f"{origin} has format {written}, and this version of diloco-core reads format {FORMAT} only"
            )
        tree: dict[str, Any] = json.loads(metadata["tree"])
        if (
            not isinstance(tree["kinds"], dict)
            or not isinstance(tree["parameters"], dict)
            or not all(isinstance(tree[name], int) for name in ("inner_steps", "rollback"))
            or "random" not in tree
        ):
            raise TypeError("it does not say what it holds")
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
    """A value as JSON, in which tensors are numbers of entries."""
    if isinstance(value, int) and value.bit_length() > _DECIMAL_BITS:
        return {"int": hex(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        if value.dtype not in _DTYPES:
            raise ConfigurationError(f"{where} is a tensor of {value.dtype}, which cannot be saved")
        if (
            type(value.detach()) is not torch.Tensor
            or value.layout is not torch.strided
            or value.is_meta
        ):
            raise ConfigurationError(
                f"{where} is {kind_of(value.detach())} ({value.layout}, on {value.device}), which cannot be saved: plain "
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
        f"{where} is {kind_of(value)}; numbers, text, lists, tuples, dicts and tensors can be saved"
    )


def _entry(where: str, key: object) -> str:
    # Python refuses to show an integer of thousands of digits.
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
