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

    def list_keys(self, folder):
        self.calls.append(("list_keys", folder))
        yield from [key for key in self if key.startswith(folder)]

    def delete(self, key):
        self.calls.append(("delete", key))
        self.pop(key, None)

    def journal(self):
        return StoreJournal(
            "mem://run/journal",
            put=self.put,
            create=self.create,
            read=self.read,
            list_keys=self.list_keys,
            delete=self.delete,
        )
