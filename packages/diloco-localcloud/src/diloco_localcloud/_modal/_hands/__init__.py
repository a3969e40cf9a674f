"""The workspace, calls and Dicts as a test handles them, whether calls are scripted or run."""
