"""Strict membership: all ranks or nothing.

Keys below the run's prefix::

    manifest.json              what this run is, for people and tools (written by rank 0)
    manifests/{life}.json      the same for a later life of the run, and which syncs of the lives before it count
    claims/{rank}.json         which process has taken the rank; written once
    meetings/{rank}.{life}.json    which processes a process sees that resumes the run
    schemas/{digest}.json      the tensors and settings that a claim refers to; replicas that agree write the same object
    beats/{rank}               a counter that shows that the rank is alive
    notes/{rank}.json          how the rank ended: "left" or "failed", and which other rank caused its failure
    deltas/{sync}/{rank}.{run}.{fingerprint}.{groups}.safetensors    a contribution; never changed, deleted when all have used it
    commits/{sync}.{run}.json  who is in the sync; written after all contributions
    state/{sync}/{shard}.{run}.safetensors             new parameters and outer state: the checkpoint
    inner/{rank}/{sync}.{run}.safetensors             what belongs to one rank alone; the newest two stay
    unsynced/{nonce}/{number}.safetensors             what belongs to the model and is not synced; written once by rank 0
    requests/{sync}/{shard}.{rank}                    the rank has found the shard damaged; the shard's owner writes it again

In later lives of a run that was stopped and resumed, the keys of claims, beats and notes are ``{rank}.{life}`` instead of
``{rank}``, where the life is the number of the process among those of its rank.

Records are sealed (:mod:`._sealed`), and payloads carry checksums. Any other object below the prefix is ignored.

Each rank writes only its own keys, except for schemas and commit records, which are the same bytes whichever rank writes
them. So no conditional write is needed, and no rank ever decides anything by itself. Everyone who may write below the prefix
is trusted.
"""
