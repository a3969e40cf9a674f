"""What a launch would send to a cluster, to look at before it is sent.

No cluster is needed, and nothing is called.
"""

import json
import sys

from diloco_eks import EKSExecutor


def main():
    """The Job for four replicas with a GPU each."""
    with EKSExecutor(
        "registry.example/team/trainer:1",
        cpu_request="8",
        memory_request="32Gi",
        service_account_name="trainer",
    ) as executor:
        plan = executor.plan(
            4,
            "diloco_core.replica_entrypoint:run",
            {"trainer_module": "my_trainer", "trainer_kwargs": {"steps": 1000}},
            gpu="L4",
            timeout=3600,
            run_id="example",
        )
    (job,) = plan.requests
    sys.stdout.write(json.dumps(job, indent=2) + "\n")


if __name__ == "__main__":
    main()
