"""The part behind the API: the cluster and its controllers."""
