"""Taking a model out of a run's store, without any replica."""
