"""Elastic membership: replicas may die, come back, join late and leave."""
