"""What belongs to one replica alone in the tests of inner state."""

import torch


class Loader:
    def __init__(self):
        self.position, self.seen = 0, []

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        self.seen.append(self.position)
        return torch.full((4, 3), float(self.position))

    def state_dict(self):
        return {
            "position": self.position,
            "seen": list(self.seen),
            "pair": (1, None),
            "weights": torch.ones(3),
        }

    def load_state_dict(self, state):
        assert state["pair"] == (1, None)
        assert torch.equal(state["weights"], torch.ones(3))
        self.position, self.seen = state["position"], state["seen"]
