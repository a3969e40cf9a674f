"""What the replicas of a run agree on, and what an exchange can do: an option of the outer loop is a field here."""
