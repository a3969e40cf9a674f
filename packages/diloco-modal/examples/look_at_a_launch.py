"""What a launch would send to Modal, to look at before it is sent.

No account is needed, and nothing is called.
"""

import json
import sys

from diloco_modal import ModalSpawnExecutor


def main():
    """The call of one of two replicas with a GPU each."""
    with ModalSpawnExecutor(app="my-app") as executor:
        plan = executor.plan(
            2,
            "diloco_core.replica_entrypoint:run",
            {"trainer_module": "my_trainer", "trainer_kwargs": {"steps": 1000}},
            gpu="H100",
            timeout=3600,
            run_id="example",
        )
    _, call = plan.requests
    sys.stdout.write(json.dumps(call, indent=2) + "\n")


if __name__ == "__main__":
    main()
