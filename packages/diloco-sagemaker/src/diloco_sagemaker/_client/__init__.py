"""Calls to AWS: clients, credentials, checked answers, errors, and jobs as they were last seen."""
