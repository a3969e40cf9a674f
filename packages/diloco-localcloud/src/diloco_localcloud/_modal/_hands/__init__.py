"""What a test holds in its hands, whether calls are scripted or run: the workspace, calls, Dicts."""
