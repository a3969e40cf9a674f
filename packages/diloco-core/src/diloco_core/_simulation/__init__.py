"""Training several replicas in one process, to choose settings before anything is paid for."""
