"""A store in memory, and a journal over its five functions."""

from diloco_protocol import StoreJournal


class Objects(dict):
    """Objects by key; every call of a function is counted."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def put(self, key, data):
        self.calls.append(("put", key))
        self[key] = data

    def create(self, key, data):
        self.calls.append(("create", key))
        return self.setdefault(key, data) is data

    def read(self, key, most):
        self.calls.append(("read", key, most))
        return self[key][:most] if key in self else None

    def names(self, folder):
        self.calls.append(("names", folder))
        below = [key[len(folder) :] for key in list(self) if key.startswith(folder)]
        yield from {key.partition("/")[0] + "/" * ("/" in key) for key in below}

    def delete(self, key):
        self.calls.append(("delete", key))
        self.pop(key, None)

    def journal(self):
        return StoreJournal(
            "mem://run/journal",
            put=self.put,
            create=self.create,
            read=self.read,
            names=self.names,
            delete=self.delete,
        )
