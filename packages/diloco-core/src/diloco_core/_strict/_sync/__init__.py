"""One sync of a strict run: contribute, commit, reduce and update, publish, adopt."""
