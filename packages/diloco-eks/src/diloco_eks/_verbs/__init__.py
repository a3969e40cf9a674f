"""The parts of the executor's methods: launch, watch, log, cancel, check."""
