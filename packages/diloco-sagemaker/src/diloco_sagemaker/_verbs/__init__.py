"""What an executor does with jobs: launch, cancel, logs, runs, results, check."""
