"""Pure functions that read what Modal and the record of a run say; handles, states, ends."""
