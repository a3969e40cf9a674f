"""What differs between runs in which all ranks take part in every sync and runs whose replicas come and go."""
