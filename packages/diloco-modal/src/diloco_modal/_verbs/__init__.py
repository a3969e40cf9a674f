"""The executor's verbs: launch, look, cancel, logs, check."""
