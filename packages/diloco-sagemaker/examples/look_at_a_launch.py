"""What a launch would send to AWS, to look at before it is sent.

No account is needed, and nothing is called.
"""

import json
import sys

from diloco_sagemaker import SageMakerExecutor


def main():
    """The training job of one of two replicas with a GPU each."""
    with SageMakerExecutor(
        role_arn="arn:aws:iam::123456789012:role/trainer",
        image_uri="123456789012.dkr.ecr.eu-west-1.amazonaws.com/trainer:1",
        output_s3_path="s3://bucket/runs",
        region="eu-west-1",
        spot=True,
    ) as executor:
        plan = executor.plan(
            2,
            "diloco_core.replica_entrypoint:run",
            {"trainer_module": "my_trainer", "trainer_kwargs": {"steps": 1000}},
            gpu="L4",
            timeout=3600,
            run_id="example",
        )
    _, job = plan.requests
    sys.stdout.write(json.dumps(job, indent=2) + "\n")


if __name__ == "__main__":
    main()
