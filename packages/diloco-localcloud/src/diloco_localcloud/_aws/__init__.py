"""The stand-ins for SageMaker, with the other AWS services that its jobs and launchers use."""
