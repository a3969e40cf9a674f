"""The run that is resumed: finding it, and checking that this replica fits it, before anything is written."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError, MismatchError, RendezvousError
from ..._exchange._base import Schema
from ..._exchange._begun_with import OR_ELSE, check_schema, other_setting
from ..._exchange._schemas import MAY_CHANGE
from ..._store._copies import read_or_copy
from ..._store._reread import read_again
from .._claims import refuse_elastic
from .._records._manifest import MANIFEST, Manifest, check_descent, lives_listed, manifest_key

if TYPE_CHECKING:
    from ..._store._patient import Patient
    from ..._timing import Timing

GO_BACK = (
    'To continue from the state before it, if that is still there, start all ranks again with resume="newest-whole": what the '
    "run has learned since is lost then."
)
# Only what is synced: its values are replaced anyway. What is not synced must hold the same values.
_VALUES = re.compile(r"( in fragment .*) with values [0-9a-f]+")
_log = logging.getLogger("diloco_core")


def find_run(store: Patient, timing: Timing, *, may_go_back: bool) -> Manifest:
    """The newest manifest of the run that is to be resumed.

    Args:
        store: The run's prefix.
        timing: Its ``sleep`` is used before a manifest is read again.
        may_go_back: Whether to pass over later manifests that are damaged.

    Raises:
        RendezvousError: There is no run, or none that could have published a state.
        RunExistsError: The prefix holds an elastic run.
        CorruptedObjectError: The manifest is damaged, or it is gone.
        FormatError: Another version of diloco-core has begun the run.
    """
    claims = store.list("claims/")
    refuse_elastic(store.uri, claims)
    manifest = newest_manifest(store, timing, may_go_back=may_go_back)
    if manifest is None:
        if store.list("state/") or store.list("commits/"):
            raise CorruptedObjectError(
                f"{store.uri}/{MANIFEST} and its copy are gone, while other objects of a run are there: something else has "
                "deleted them. The run cannot be resumed without them. If you have a backup, put it back."
            )
        if claims:
            raise RendezvousError(
                f"the run at {store.uri} ended before all of its replicas had met, so there is nothing to resume. Begin a new "
                "run on another prefix, without resume=."
            )
        raise RendezvousError(
            f"{store.uri} holds no run that could be resumed: check the URI. To begin a run there, leave resume= out."
        )
    if not manifest.fragments:
        raise RendezvousError(
            f"{store.uri} holds a run without a model, such as plain means, which cannot be resumed: use another prefix"
        )
    return manifest


def newest_manifest(
    store: Patient, timing: Timing, before: int | None = None, *, may_go_back: bool
) -> Manifest | None:
    """The newest manifest of the run; None if there is none. The run is what this one says.

    Args:
        store: The run's prefix.
        timing: Its ``sleep`` is used before a manifest is read again.
        before: Only manifests of earlier lives of rank 0 than this one count; if left out, all.
        may_go_back: Whether to pass over later manifests that are damaged.

    Raises:
        CorruptedObjectError: The manifest is damaged, or belongs to another run than the first one.
        FormatError: Another version of diloco-core has begun the run.
    """
    lives = [
        life for life in lives_listed(store.list("manifests/")) if before is None or life < before
    ]
    for life in lives:
        try:
            manifest = read_manifest(store, timing, life)
            if manifest is None:
                raise CorruptedObjectError(
                    f"{store.uri}/{manifest_key(life)} and its copy are gone, although they were listed"
                )
        except CorruptedObjectError as error:
            text = (
                f"{str(error).rstrip('.')}. It describes what the run has done since it was resumed. If you have a backup, put "
                "it back."
            )
            if not may_go_back:
                raise CorruptedObjectError(f"{text} {GO_BACK}") from error
            _log.error("%s", text)
        else:
            check_descent(_first_manifest(store, timing, life), manifest, store.uri)
            return manifest
    try:
        return read_manifest(store, timing, 1)
    except CorruptedObjectError as error:
        raise CorruptedObjectError(
            f"{str(error).rstrip('.')}. It says what the run is, which cannot be resumed without it. If you have a backup, put "
            "it back."
        ) from error


def _first_manifest(store: Patient, timing: Timing, life: int) -> Manifest | None:
    """The manifest of the first life, which the later ones repeat; None if it cannot be read."""
    # Not its copy: that may be a leftover, and is not needed here.
    try:
        manifest = read_again(timing, partial(_stored, store, MANIFEST, 1))
        damage = f"{store.uri}/{MANIFEST} is gone"
    except CorruptedObjectError as error:
        manifest, damage = None, str(error).rstrip(".")
    if manifest is None:
        _log.error(
            "%s. Something outside the run deletes or changes its objects. The run does not need this one any more, since %s "
            "says the same.",
            damage,
            manifest_key(life),
        )
    return manifest


def read_manifest(store: Patient, timing: Timing, life: int) -> Manifest | None:
    """The manifest that a life of rank 0 has written, or its copy if the manifest is damaged or gone; None without both.

    Raises as :func:`newest_manifest` does.
    """
    return read_or_copy(
        lambda key: read_again(timing, partial(_stored, store, key, life)),
        manifest_key(life),
        store.uri,
    )


def _stored(store: Patient, key: str, life: int) -> Manifest | None:
    data = store.get(key)
    return None if data is None else Manifest.from_bytes(data, life, f"{store.uri}/{key}")


def manifest_if_written(store: Patient, timing: Timing, life: int) -> Manifest | None:
    """The manifest that a life of rank 0 has written; None if it is not there (yet): the copy is written before it.

    Raises as :func:`newest_manifest` does.
    """
    if not store.read(manifest_key(life), lambda _: True):
        return None
    return read_manifest(store, timing, life)


def check_fits(manifest: Manifest, schema: Schema, rank: int, world_size: int, uri: str) -> None:
    """Refuse a replica with another world size, other settings or another model than the run was begun with.

    Raises:
        MismatchError: The message names the first difference, what the run has, what was given, and what to do.
    """
    if manifest.world_size != world_size:
        raise other_setting(uri, rank, "world_size", str(manifest.world_size), str(world_size))
    own, theirs = (
        Schema(
            {name: _VALUES.sub(r"\1", line) for name, line in tensors.items()},
            {name: value for name, value in settings.items() if name not in MAY_CHANGE},
        )
        for tensors, settings in (
            (schema.tensors, schema.settings),
            (manifest.tensors, manifest.settings),
        )
    )
    check_schema(uri, rank, own, theirs, "the run")
    fragments = [dict(fragment) for fragment in schema.fragments]
    if fragments != [dict(fragment) for fragment in manifest.fragments]:
        raise MismatchError(
            f"the tensors of rank {rank} are not arranged as they were when the run at {uri} began: build the model and cut it "
            f"into fragments in the same way, {OR_ELSE}."
        )
