"""What the executor's constructor takes, as a help page shows it."""

from diloco_protocol import Option

OPTIONS = (
    Option("image", "text", "(required)", "the replicas' container image"),
    Option("namespace", "text", "default", "where runs are launched and looked for"),
    Option(
        "service_account_name",
        "text",
        "the namespace's default",
        "of the pods; carries their AWS role",
    ),
    Option("node_selector", "text to text", "{}", "of the pods"),
    Option("tolerations", "list of mappings", "[]", "of the pods; the one for GPU nodes is added"),
    Option("runtime_class_name", "text", "none", "gVisor, Kata and the like"),
    Option(
        "command", "list of words", "python -m diloco_protocol.runner", "what starts the runner"
    ),
    Option("cpu_request", "quantity", "4", "CPU of a replica; request and limit"),
    Option("memory_request", "quantity", "16Gi", "memory of a replica; request and limit"),
    Option(
        "ttl_seconds_after_finished",
        "seconds",
        "3600",
        "how long a run can be asked about after its end",
    ),
    Option(
        "backoff_limit",
        "number",
        "0",
        "restarts of a failed replica, where the launch does not say",
    ),
    Option("gpu_resource_key", "text", "nvidia.com/gpu", "the extended resource of GPUs"),
    Option("run_id", "text", "run", "prefix of the names of runs"),
    Option("batch_api", "BatchV1Api", "none", "a client to use instead of our own"),
    Option("core_api", "CoreV1Api", "none", "a client to use instead of our own"),
    Option("context", "text", "the current one", "of the kubeconfig"),
    Option(
        "kubeconfig", "path", "in-cluster, $KUBECONFIG, ~/.kube/config", "how to reach the cluster"
    ),
    Option("env", "text to text", "{}", "variables for every launch"),
    Option("labels", "text to text", "{}", "of Jobs and pods"),
    Option("annotations", "text to text", "{}", "of Jobs"),
    Option("owner", "text", "none", "label diloco.dev/owner"),
    Option(
        "on_replica_failure", "fail_run or continue", "fail_run", "whether one failure ends the run"
    ),
    Option(
        "pending_timeout", "seconds", "3600", "what waiting for nodes and images may add to the run"
    ),
    Option("grace", "seconds", "10", "between SIGTERM and SIGKILL"),
    Option("queue", "text", "none", "Kueue's local queue"),
    Option("gpu_types", "name to label to values", "{}", "GPUs beyond our table"),
    Option("ephemeral_storage", "quantity", "none", "local disk of a replica"),
    Option("shm_size", "quantity", "none", "size of /dev/shm"),
    Option("efa", "number", "0", "EFA devices of a replica"),
    Option("pod_overlay", "pod template", "none", "merged over ours by name"),
    Option(
        "request_timeout", "seconds", "30", "for a connection, and between two pieces of an answer"
    ),
    Option("retry_timeout", "seconds", "30", "how long calls other than polls are tried again"),
    Option(
        "journal", "RunJournal", "none", "where launches and ends are written down beyond the TTL"
    ),
    Option("backoff", "Backoff", "1 s to 15 s", "pauses of collect and of retries"),
)
