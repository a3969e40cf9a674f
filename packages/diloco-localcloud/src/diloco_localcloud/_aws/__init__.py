"""The stand-ins of SageMaker, with the services of AWS that its jobs and launchers use."""
