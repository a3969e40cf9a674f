"""Say who takes part in the syncs of a simulated run, and who reloads."""

from diloco_core import Elastic
from diloco_core._run._records._keys import commit_key
from diloco_core._run._records._records import Commit


def members_in(store):
    """The ranks that every sync names, in the order of the syncs."""
    found = []
    while (data := store.objects.get(commit_key(len(found) + 1))) is not None:
        found.append([member.rank for member in Commit.from_json(data, len(found) + 1, "").members])
    return found


def reloads(training, rank):
    """Return how often the first incarnation of a rank has reloaded."""
    return [report.reloaded for report in training.reports[rank, 1]].count(True)


def gathering(quorum=2, grace=20.0, publish_every=1):
    """Settings of the gather topology."""
    return Elastic(quorum, grace=grace, topology="gather", publish_every=publish_every)
