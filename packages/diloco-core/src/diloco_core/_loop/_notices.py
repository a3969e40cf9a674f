"""The log messages of an outer loop.

They say where it goes on, and what training was lost, undone or not seen, with what to do about it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger("diloco_core")

# What happens in every run, for whoever watches: one line for each sync, and one at the end.
SYNCED = (
    "rank %d: outer step %d, fragment %s: %s, %d inner steps here, %.3g MB sent, %.2f s "
    "without training"
)
NOT_SYNCED = "rank %d: no outer step was taken with fragment %s: still at outer step %d"
DONE = "rank %d: done, after outer step %d and inner step %d"

# A fixed run is continued.
RESUMED = "rank %d: goes on from outer step %d, and from inner step %d of its own"

# A rank begins without inner state although the run has counted steps of it, or what was saved
# cannot be used.
FRESH_INNER_STATE = (
    "rank %d: this replica continues with a fresh inner state%s. %s start from the beginning. A "
    "data loader has to skip the %d batches that the run has counted for this rank "
    "(batches_to_skip)."
)
INNER_STATE_GIVEN_UP = (
    "rank %d: the inner state in %s is not restored: it was saved after sync %d, which the run has "
    "since given up"
)
OLDER_INNER_STATE = (
    "rank %d: restored the inner state that was saved after sync %d instead. Skip %d batches "
    "(batches_to_skip)."
)
INNER_STATE_BEHIND = (
    "rank %d: the newest inner state of this rank was saved after sync %d, %d inner steps before "
    "the state that the run continues from. %s do not hold these steps; a data loader among them "
    "has to skip their batches (batches_to_skip).%s"
)
SAVED_SETTINGS = (
    "rank %d: the inner optimizers continue with the settings that were saved, not with those that "
    "they were now created with: %s. To change a setting of a run in progress, set it in "
    "optimizer.param_groups inside the block."
)

INNER_STATE_NOT_LOADED = (
    "rank %d: the inner optimizer (%s) had a state when this outer loop was saved, and has none "
    "now. Load its state_dict() too, unless it is meant to start from the beginning."
)

# This replica has asked for an outer learning rate, and the run has taken the one that another
# replica asked for, or none.
OTHER_LR = (
    "rank %d: set_outer_lr() was called on this replica and asked for %s, but the run takes %s, "
    "which rank %d has asked for at the same time. Call set_outer_lr() again if that is not what "
    "you want."
)
UNUSED_LR = (
    "rank %d: set_outer_lr(%g) was called, but this replica has contributed to no sync since then, "
    "so nothing was changed."
)

SYNC_CAME_LATE = (
    "rank %d: a sync was due after %s and comes after %s, because it waited for %s, which has not "
    "stepped since the last sync. Every sync will be late in this way. If this optimizer never "
    "steps, leave it out and freeze its parameters; if it steps less often than the others, use a "
    "larger sync_every."
)
SLOW_FOR_ITS_WINDOW = (
    "rank %d: a sync, together with the steps of the delay, if there is one, and the first inner "
    "step after it, has taken %.3g s, but all replicas contribute every %s (sync_every, divided by "
    "the number of fragments). After that the others wait only for a grace. A replica that is "
    "always later than that is never counted: use a larger sync_every, a larger grace, a smaller "
    "delay or shorter inner steps."
)

LEFT_WITHOUT_A_STEP = (
    "rank %d: the block was left without a single step of the inner optimizer, so nothing was "
    "synced. Was another optimizer stepped, such as a copy, or was its step() replaced?"
)
LEFT_A_RUN_WITHOUT_A_STEP = (
    "rank %d: the block was left without a single step of the inner optimizer. The run is at outer "
    "step %d. To continue it, train until outer.committed or outer.inner_steps is larger than now."
)
LEFT_BEFORE_A_SYNC = (
    "rank %d: the block was left after %d inner steps, before the first sync, which comes after "
    "%s. Because of flush='none', the model ends without these steps%s."
)
STEPS_ARE_SAVED = ". They are saved, and a run that is resumed goes on with them"
STEPS_ARE_LOST = ", and they are lost"

# An elastic run has gone back to older states, which count fewer inner steps of this replica.
WENT_BACK = (
    "rank %d: the run has returned to an older state, which does not hold the inner steps of this "
    "replica from step %d on. The replica continues with new batches. The batches of the steps "
    "before %d are lost, unless this replica is restarted before its next contribution is counted."
)
RELOADED = (
    "rank %d: reloaded the model as it is after outer step %d of the run. Inner steps of this "
    "replica that are lost because no sync holds them: %s."
)
# A fixed run is resumed without the inner steps of some fragments since their last sync.
OPEN_STEPS_LOST = (
    "rank %d: inner steps of this replica that are lost because neither a sync nor a saved inner "
    "state holds them: %s. %s.%s"
)
BETWEEN_TWO_SAVES = "The run was stopped between two saves, or the newest save is gone"
NOTHING_IS_SAVED = "With save_inner_every=0, nothing is saved or restored"
# An incarnation of an elastic run begins without steps that only the syncs of other fragments hold.
LOST_BETWEEN_FRAGMENTS = (
    "rank %d: an earlier incarnation of this rank ended between the syncs of two fragments. Inner "
    "steps that are lost because the syncs of these fragments do not hold them: %s. They are not "
    "repeated, since the sync of another fragment has counted them. Only a contribution that the "
    "earlier incarnation had sent before may still be counted."
)
OVERTAKEN = (
    "rank %d: the run has counted %d inner steps that an earlier incarnation of this rank took and "
    "this one did not. Skip the same number of batches, or they are learned twice: see "
    "SyncReport.batches_to_skip, which on_sync receives."
)
# batches_to_skip was asked for after inner state was restored, but stateful holds nothing that
# could be a loader.
LOADER_NOT_RESTORED = (
    "rank %d: batches_to_skip is %d, counted from the saved inner state, but no data loader was "
    "restored with it: stateful= has none. The %d batches before that are not counted. A loader "
    "that starts from the beginning would give them again: pass it in stateful=, or choose batches "
    "by outer.inner_steps."
)
PUT_BACK = (
    "rank %d: parameters were changed after the last sync without a step of the inner optimizer: "
    "%s. Their committed values were restored, and all replicas end with the same model. To change "
    "the model at the end of the training, do so after the block. If the change was a training "
    "step, it was taken by another optimizer, or by a step() that was replaced."
)
# Too few replicas were left for another sync.
LEFT_OUT = (
    "rank %d: the last %d inner steps of this replica are not in the model, because too few "
    "replicas were left to sync them. This replica ends with the values of outer step %d."
)
# Another replica of a fixed run has left, so there can be no more syncs.
PARTED = (
    "rank %d: %s The last %d inner steps of this replica are not in the model: like all others, it "
    "ends with the values of outer step %d. If inner state is saved, the save holds these steps, "
    "and a resumed run goes on with them. If this replica continues to train instead of leaving "
    "the block, an error is raised."
)
TOLD_TO_END = (
    "rank %d: told to end (SIGTERM) after inner step %d: saving what can be saved, and leaving "
    "with exit code 143"
)
NOT_SAVED_AT_THE_END = "rank %d: the inner state was not saved: %s"
# Error feedback starts again from zero in a fragment, since what it held belongs to another state
# of the run.
RESIDUAL_LOST = (
    "rank %d: error feedback of fragment %s starts again from zero after sync %d: what the codec "
    "had lost of this rank's contributions was not saved at the point from which the run goes on, "
    "and is not sent any more.%s"
)


def some(names: Sequence[str]) -> str:
    """At most three of these names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
