"""The object store: what a run needs of it, how one is opened, and how it is read and written well."""
