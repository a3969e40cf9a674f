"""The object store: what a run needs of it, how to open one, and how to read and write it well."""
