"""What happens behind the API: the cluster and its controllers."""
