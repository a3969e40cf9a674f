"""Hold what tests of going back have in common."""

from diloco_core._run._records._keys import commit_sync
from diloco_core._run._records._records import Rollback, read_record


def rollbacks_in(store):
    records = [
        read_record(data, commit_sync(key), "")
        for key, data in store.decided.items()
        if commit_sync(key)
    ]
    return [record for record in records if isinstance(record, Rollback)]
