"""Strict membership: all ranks or nothing.

Keys under the run's prefix::

    manifest.json              what this run is (written by rank 0); manifest.copy.json has the same bytes
    manifests/{life}.json      the same after the run was resumed, and which earlier syncs count; the life is that of rank 0.
                               {life}.copy.json has the same bytes
    claims/{rank}.json         which process has taken the rank; written once
    meetings/{rank}.{life}.json    which processes are seen by one that resumes the run
    schemas/{digest}.json      the tensors and settings that a claim refers to; replicas that agree write the same object
    beats/{rank}               a counter that shows that the rank is alive
    notes/{rank}.json          how the rank ended: "left" or "failed", and which other rank caused its failure
    deltas/{sync}/{rank}.{run}.{fingerprint}.{groups}.safetensors    a contribution; never changed, deleted when all have used it
    commits/{sync}.{run}.json  who is in the sync; written after all contributions
    state/{sync}/{shard}.{run}.safetensors             new parameters and outer state: the checkpoint. Of a fragment's first
                                                       state there are copies, {shard}.{run}.copy.safetensors
    inner/{rank}/{sync}.{run}.{life}.safetensors      what belongs to one rank alone; the newest two stay
    unsynced/{nonce}/{number}.safetensors             what belongs to the model and is not synced; written once by rank 0
    requests/{sync}/{shard}.{rank}                    the rank has found the shard damaged; the shard's owner writes it again

A *life* is one process in the role of a rank. A rank has several, numbered from 1, if the run was stopped and resumed. From the
second one on, the keys of its claims, beats and notes have ``{rank}.{life}`` in place of ``{rank}``.

Records are sealed (:mod:`._sealed`), and payloads carry checksums. Any other object under the prefix is ignored.

Each rank writes only its own keys, except for schemas and commit records, which are the same bytes whichever rank writes
them. So no conditional write is needed. No rank decides anything by itself, except that rank 0 chooses the state from which a
run is resumed. Everyone who may write under the prefix is trusted.
"""
