"""The outer loop: each replica takes H inner steps alone, then all take one outer step together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, Self

import torch

from .._checks import one_of, whole
from .._codecs._codec import Codec
from .._connect import connect
from .._errors import ConfigurationError
from .._exchange._base import Exchange
from .._exchange._replica import ReplicaExchange
from .._exchange._report import SyncReport
from .._inner._state import Stateful
from .._inner._steps import optimizers_of
from .._model._own_buffers import OwnBuffers
from .._model._partition import Buffers, split
from .._model._values import plain_name
from .._outer._groups import checked_groups, group_of_parameters
from .._outer._groups import outer_groups as outer_groups_of
from .._outer._optimizer import OuterOptimizerFactory
from .._seconds import Seconds
from .._terms._making import make_terms
from ._arguments import check_parties, check_topology, fragments_of, stateful_of
from ._membership import SAVE_INNER_EVERY, membership_of
from ._outer_loop import OuterLoop
from ._synced_model import SyncedModel

KINDS: dict[type, type[DiLoCo]] = {}
"""The loops for some kinds of exchanges; the layer above adds to it."""


class DiLoCo(OuterLoop):
    """DiLoCo's outer optimization around a training loop (Douillard et al., arXiv 2311.08105).

    Inside the ``with`` block every ``inner_optimizer.step()`` counts as one inner step; of several
    inner optimizers, all have to step for it, in any order (one that a gradient scaler skips is not
    waited for). After ``sync_every / fragments`` inner steps the next fragment is synced: the mean
    of the replicas' pseudo-gradients (global copy minus local parameters) goes through the outer
    optimizer, and every replica adopts the result. So each fragment is synced once per
    ``sync_every`` steps (Streaming DiLoCo, arXiv 2501.18512; see ``delay``). Inner optimizer state
    stays with its replica.

    The global copy and the outer state are kept on the CPU in
    ``promote_types(parameter dtype, float32)``. The gradients of adopted parameters are dropped,
    since they were computed with the old values. Only trainable parameters are synced, tied ones
    once; what happens to buffers is declared by ``buffers``.

    The set of synced tensors is fixed when the loop is made. Every sync checks the model and the
    optimizers: a parameter that has been replaced, converted, added, removed or unfrozen since
    then, and an optimizer that holds other parameters, are refused by name. Freezing a parameter is
    allowed, and so is assigning new tensors to buffers. Parameters that were frozen when the loop
    was made must keep their values. These are checked too, some of them at every sync and all of
    them at the end. When replicas meet, frozen parameters and non-persistent buffers must hold the
    same values everywhere; a replica that joins an elastic run later is compared with the values at
    the run's start. Keep values that are meant to differ between replicas in plain attributes.

    Entering the block meets the other replicas and adopts rank 0's parameters. Leaving it without
    an error syncs a partial period, restores values that were changed after the last sync without a
    step (also in buffers, such as running statistics), and tells the others that this replica is
    done. Leaving it by an exception tells them that this replica has failed, and they need not wait
    for it. A sync that raises leaves this replica's parameters undefined; the store holds the state
    of the last sync. If the error of a sync is caught inside the block, every further use of the
    loop raises an error, and so does leaving the block.

    SIGTERM (a spot instance is reclaimed, a node is drained, the run is cancelled) is handled for
    the time of the block, in the main thread and where the program has no handler of its own: after
    the inner step under way what can be saved is saved (see ``save_inner_every``), the others are
    told, and ``SystemExit(143)`` leaves the block, so that the platform starts the replica again.
    In a sync it leaves at once. A program with a handler of its own does the same: it saves, and
    raises or exits.

    Keep the optimizers that were given. If parameters are trained while none of these optimizers
    steps, an :class:`UnseenStepsError` is raised: after many backward passes (at most
    ``3 * max(sync_every, 10)``), or when the block is left after more than ``max(sync_every, 10)``
    of them; with :class:`Seconds`, 100 takes the place of ``sync_every``. After fewer, the old
    values are restored with a warning; where known steps came before them, the last sync takes
    both.

    In fixed runs all replicas have to take the same number of syncs. If another replica has left
    after fewer syncs because it took fewer inner steps, the progress of this replica since the last
    sync is dropped with a warning, and it ends with the same values as all others. If it continues
    to train after ``sync_every`` steps have been dropped, an ``UnequalSyncsError`` is raised. If
    all replicas train until :attr:`committed` has the wanted value, nothing is dropped.

    A fixed run over a store can be continued after it has stopped (:func:`connect` with
    ``resume=True``): all ranks enter the block again. They take the newest state that is whole in
    the store, the counters, and the inner state of their rank.

    In elastic runs (:func:`connect` with ``min_replicas``) entering the block takes the run's
    newest state instead, and leaving it syncs a partial period only if enough replicas are left.
    Train until :attr:`committed` has the wanted value: it counts the outer steps of the run's
    model, including those before this replica joined.

    Not thread-safe: use it from the thread that trains.

    Args:
        model: The model; its parameters may be on any device, in bf16, fp16, fp32 or fp64.
        inner_optimizer: The optimizer that the training loop steps, or a list of those that make
            one step together.
        exchange: The connection to the other replicas, from :func:`connect` or :func:`in_process`.
        sync_every: H, inner steps (calls of ``step()``, not micro-batches) between two syncs of the
            same fragment; a positive multiple of the number of fragments. Or ``Seconds(60)``, in
            elastic runs: each replica takes as many steps as it can in that time.
        fragments: The number of fragments of about equal size into which the model is cut, in the
            order of its parameters. ``("strided", 4)`` deals the repeated layers of a transformer
            out to four fragments like cards, and ``("sequential", 4)`` keeps neighbours together;
            ``"strided"`` or ``"sequential"`` alone puts up to three layers into each fragment, as
            in the paper. What comes before the layers (embeddings) goes into the first fragment,
            and what comes after them (final norm, head) into the last. Or a list of modules, or of
            lists of modules, each of which becomes one fragment: a parameter that several of them
            hold belongs to the first.
        outer_lr: Learning rate of the outer SGD; 0.7 if left out. Or a function that is given the
            number of an outer step, from 1 (:attr:`SyncReport.sync`), and returns its learning
            rate; ``outer_optimizer`` may be given with it. The rate that was used is recorded with
            the sync, and all replicas take it from there, also those that come late or take the
            step again. It is what the function returns on one of them: on rank 0 in fixed runs, and
            in elastic runs on the replica that writes the record. :meth:`set_outer_lr` changes the
            rate of a running run.
        outer_momentum: Its momentum, in [0, 1); 0.9 if left out.
        nesterov: Whether the momentum is Nesterov's (as in ``torch.optim.SGD``). If left out, it is
            where there is momentum.
        outer_optimizer: A function that makes any element-wise torch optimizer from a list of
            parameters; replaces these three arguments. The optimizer is tried out on a small
            tensor, both whole and cut into pieces.
        outer_groups: Outer settings of their own for parts of the model, in the form of torch's
            parameter groups: ``[{"params": model.embedding.parameters(), "lr": 0.4}, {"params":
            model.blocks, "momentum": 0.6}]``. The ``"params"`` of a group are parameters or
            modules, and every trainable parameter must be in exactly one group; there are at most 8
            of them. The other keys are ``"lr"`` (a number or a function of the sync),
            ``"momentum"`` and ``"nesterov"``, or, with ``outer_optimizer``, whatever the groups of
            that optimizer may have; what a group leaves out is as the arguments above say. All
            replicas need the same groups.
        buffers: ``"mean"`` (floating-point buffers; counters from rank 0), ``"rank0"`` or
            ``"none"``. With several fragments, buffers are synced with the last one. With
            ``"none"`` each rank has its own; in runs over a store they are saved and restored with
            its inner optimizer.
        init: ``"rank0"``: all adopt rank 0's initial parameters. ``"check"``: differing initial
            values are refused; not in elastic runs and where a run is resumed, since every replica
            takes the run's state there.
        flush: What happens to a partial period when the block is left. ``"partial"``: it is synced.
            This is a full outer step, with the whole learning rate and momentum, however few inner
            steps it covers: after a single inner step, the outer step consists mostly of the
            momentum of earlier ones. ``"none"``: it is dropped, and the model ends in the last
            committed state, which is the same on all replicas. If a fixed run over a store is
            resumed, each rank goes on with the steps that it had dropped.
        delay: How many inner steps before the end of its period a fragment is sent; the result is
            adopted at the end, and the replica trains meanwhile (Streaming DiLoCo, where it is
            called tau). Less than ``sync_every / fragments``. With :class:`Seconds`, a fragment is
            sent at the end, and the result is adopted so many steps later. If the result is there
            in time, a sync costs no training time. The steps taken meanwhile are replaced by the
            result, except for what ``alpha`` keeps. It needs memory for one more copy of a fragment
            (two if a sync leaves this replica out), and over a process group it needs a group of
            its own.
        alpha: How much of its own parameters a replica keeps when it adopts a sync: each becomes
            ``(1 - alpha)`` times the synced value plus ``alpha`` times its own, also without a
            delay. 0.5 in the paper. The block is left with the synced values in any case.
        codec: How pseudo-gradients are sent: ``"plain"`` (as they are in memory), ``"fp32"``,
            ``"bf16"``, ``"fp16"``, ``"int8"``, ``"e2m1"`` (4 bits), ``"topk64"`` or ``"topk128"``
            (1.6 or 3.1 % of the values in two bits; see ``docs/codecs.md`` for what goes with
            them), or an object with the members of :class:`Codec`. All replicas need the same. It
            is for runs over a store and between threads. Sums, outer steps and what is published
            keep their precision. What a codec loses of a contribution is lost, unless there is
            error feedback.
        error_feedback: Whether what a codec loses of a contribution is added to the next one
            (True), or how much of what is not sent yet: a number above 0 and at most 1 (SparseLoCo,
            arXiv 2508.15706, has 0.95). All replicas need the same. It needs memory for one more
            copy of the model, and for two of a fragment while that is synced. Left out, there is
            none, except with ``"topk64"`` and ``"topk128"``, which need it (0.95).
        weight: How much a replica's pseudo-gradient counts in a sync. ``"equal"``: all count the
            same. ``"steps"``: by the inner steps that it covers. ``"tokens"``: by the square of its
            tokens, divided by its inner steps (Decoupled DiLoCo, arXiv 2604.21428);
            :meth:`count_tokens` counts them. Left out, it is ``"equal"``, and ``"steps"`` with
            :class:`Seconds`, where ``"equal"`` is refused. The mean of buffers is not weighted. All
            replicas need the same.
        aggregate: ``"mean"``, or ``"trimmed"``: in every element of the pseudo-gradients, the
            ``trim`` largest and the ``trim`` smallest values of the replicas are left out of the
            mean, so that a few replicas with wrong values cannot move it far. Only with
            ``weight="equal"``, and so not with :class:`Seconds`. All replicas need the same.
        trim: See ``aggregate``; 1 if left out. At least ``2 * trim + 1`` replicas must take part in
            every sync.
        clip: ``"median"``: every tensor of a pseudo-gradient is scaled down, never up, to the
            median of the norms that it has on the replicas that take part, so that one with far too
            large values does not move the model far. It cannot be combined with
            ``aggregate="trimmed"``. All replicas need the same.
        state_codec: How the owners of shards publish the results of syncs: one of the names above,
            but for ``"topk64"`` and ``"topk128"``. ``"plain"``: values and outer state as they are.
            Otherwise they publish the encoded change of the values, which all replicas add, and
            what the codec loses of a change is in the next one. Only with SGD as the outer
            optimizer, over a store (not in the gather topology) and between threads. All replicas
            need the same.
        full_state_every: With a ``state_codec``, over a store: the number of syncs of a fragment
            from one whole publication of its values to the next, 8 if left out. Replicas that join
            or resume a run, and :func:`export`, start from one of these.
        stateful: Runs over a store only: further objects of this replica that are saved and
            restored with its inner optimizer and random generators, such as ``{"loader": loader}``
            (anything with ``state_dict()`` and ``load_state_dict()``). Whether they can be saved is
            tested when the block is entered, and after the first inner step. Saves are made inside
            ``step()``, and hold nothing that the loop does after it: step a learning rate schedule
            before the step, with
            ``while schedule.last_epoch < outer.inner_steps: schedule.step()``.
        save_inner_every: Runs over a store only: the number of syncs from one save of these objects
            to the next; 0 for never. The first save comes at the first sync. They are also saved
            when the block is left without an error; in elastic runs only if the run has counted all
            inner steps of this rank. A save uploads the inner optimizer's state: for Adam, about
            twice the bytes of the model. In fixed runs it also uploads the values of the fragments
            that hold inner steps at that moment, and the newest two saves of every rank are kept.
        on_sync: Called after every sync with its report: inside the inner optimizer's ``step()``,
            or where the block is left. While the block is entered it is not called: a rank of an
            elastic run that joins or comes back begins with what was decided until then, and
            :attr:`committed` says how far that is.

    Raises:
        ConfigurationError: An argument is not allowed, tensors share memory without being tied, or
            the optimizers and the model do not hold the same parameters. Nothing has been started.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Make the loop of one process among several, if the exchange is that of one."""
        exchange = options.get("exchange", arguments[2] if len(arguments) > 2 else None)
        if isinstance(exchange, ReplicaExchange):
            # The layer above, which is slow to import, since that takes all of torch's DTensor.
            import_module("diloco_core._processes._loop")
        kind = KINDS.get(type(exchange), cls)
        if cls not in (DiLoCo, kind):
            raise ConfigurationError(
                f"{cls.__name__} is a subclass of DiLoCo, which works in replicas of one process "
                "alone: use DiLoCo(...) itself where several are one replica"
            )
        return object.__new__(kind)  # type: ignore[return-value] # a subclass

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        exchange: Exchange,
        *,
        sync_every: int | Seconds,
        fragments: int
        | Literal["strided", "sequential"]
        | tuple[Literal["strided", "sequential"], int]
        | Sequence[torch.nn.Module | Sequence[torch.nn.Module]] = 1,
        outer_lr: float | Callable[[int], float] | None = None,
        outer_momentum: float | None = None,
        nesterov: bool | None = None,
        outer_optimizer: OuterOptimizerFactory | None = None,
        outer_groups: Sequence[Mapping[str, Any]] | None = None,
        buffers: Literal["mean", "rank0", "none"] = "mean",
        init: Literal["rank0", "check"] = "rank0",
        flush: Literal["partial", "none"] = "partial",
        delay: int = 0,
        alpha: float = 0.0,
        codec: str | Codec = "plain",
        error_feedback: bool | float | None = None,
        weight: Literal["equal", "steps", "tokens"] | None = None,
        aggregate: Literal["mean", "trimmed"] = "mean",
        trim: int | None = None,
        clip: Literal["median"] | None = None,
        state_codec: str | Codec = "plain",
        full_state_every: int | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        save_inner_every: int = SAVE_INNER_EVERY,
        on_sync: Callable[[SyncReport], None] | None = None,
    ) -> None:
        check_parties(model, exchange, on_sync)
        check_topology(model, exchange)
        optimizers = optimizers_of(inner_optimizer)
        given_groups = checked_groups(outer_groups)
        groups = outer_groups_of(given_groups, outer_optimizer, outer_lr, outer_momentum, nesterov)
        policy = Buffers(one_of("buffers", buffers, Buffers))
        group_of = None if given_groups is None else group_of_parameters(model, given_groups)
        parts = split(model, fragments_of(fragments), policy, group_of if len(groups) > 1 else None)
        terms = make_terms(
            exchange, sync_every=sync_every, fragments=len(parts), groups=groups, delay=delay,
            alpha=alpha, codec=codec, error_feedback=error_feedback, weight=weight,
            aggregate=aggregate, trim=trim, clip=clip, state_codec=state_codec,
            full_state_every=full_state_every, buffers=policy, init=init, flush=flush,
        )  # fmt: skip
        names = {
            id(parameter): plain_name(model, name) for name, parameter in model.named_parameters()
        }
        membership = membership_of(
            exchange,
            optimizers,
            stateful_of(stateful),
            whole("save_inner_every", save_inner_every, 0),
            names,
            OwnBuffers(model) if policy is Buffers.NONE else None,
            bool(terms.feedback),
        )
        synced = SyncedModel(model, parts, policy, optimizers, exchange, terms)
        super().__init__(synced, membership, names, on_sync)


# Otherwise it would be that of __new__, which says nothing.
DiLoCo.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    DiLoCo.__init__
).replace(parameters=[*inspect.signature(DiLoCo.__init__).parameters.values()][1:])


def make_diloco_outer_loop(
    model: torch.nn.Module,
    inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    exchange: Exchange | None = None,
    *,
    sync_every: int | Seconds = 500,
    **options: Any,
) -> DiLoCo:
    """Make an outer loop with the usual settings.

    They are H = 500, and as outer optimizer SGD with Nesterov momentum, lr 0.7 and momentum 0.9.

    Args:
        model: The model.
        inner_optimizer: The optimizer that the training loop steps, or several.
        exchange: The connection to the other replicas; if left out, what :func:`connect` returns
            without arguments.
        sync_every: Inner steps between two syncs of the same fragment; or :class:`Seconds`.
        **options: Further arguments of :class:`DiLoCo`.
    """
    if exchange is None:
        exchange = connect()
    return DiLoCo(model, inner_optimizer, exchange, sync_every=sync_every, **options)
