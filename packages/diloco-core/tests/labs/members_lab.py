"""Who takes part in the syncs of a simulated run."""

from diloco_core._run._records._keys import commit_key
from diloco_core._run._records._records import Commit


def members_in(store):
    """The ranks that every sync names, in the order of the syncs."""
    found = []
    while (data := store.objects.get(commit_key(len(found) + 1))) is not None:
        found.append([member.rank for member in Commit.from_json(data, len(found) + 1, "").members])
    return found
