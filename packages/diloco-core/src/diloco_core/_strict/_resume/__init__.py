"""How the replicas of a strict run that has stopped continue it, all together."""
