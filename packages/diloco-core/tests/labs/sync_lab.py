"""One replica that syncs one fragment, without a training loop, and a codec: for tests of single
syncs of any exchange.
"""

import torch

from diloco_core import StoreExchange
from diloco_core._arithmetic._contribution import Contribution
from diloco_core._arithmetic._layout import Rule
from diloco_core._codecs._plain import PLAIN
from diloco_core._exchange._base import Schema
from diloco_core._model._partition import NamedTensor
from diloco_core._outer._fragment import Fragment
from diloco_core._outer._groups import outer_factory
from diloco_core._outer._optimizer import OuterOptimizer
from diloco_core._terms._terms import OuterGroup, Terms

START = torch.arange(12.0)
LEARNED = [torch.full((12,), 3.0), torch.arange(12.0) / 4]
"""What each replica has subtracted from the parameters when it contributes."""


class Halved:
    """Sends the upper half of every fp32: it takes half of the bytes, and loses something."""

    name = "halved"
    plain = False
    block = 1

    def size(self, dtype, numel):
        return numel * 2

    def encode(self, values):
        return values.view(torch.int32).bitwise_right_shift(16).to(torch.int16).view(torch.uint8)

    def decode(self, data, out):
        out.view(torch.int32).copy_(data.view(torch.int16).to(torch.int32).bitwise_left_shift(16))


def rounded(values):
    out = torch.empty_like(values)
    Halved().decode(Halved().encode(values), out)
    return out


class Replica:
    """One replica that syncs one fragment of 12 parameters."""

    def __init__(self, exchange, codec=PLAIN):
        self.exchange = exchange
        self.parameter = torch.nn.Parameter(START.clone())
        tensors = [NamedTensor("weight", self.parameter, Rule.OUTER)]
        outer = OuterOptimizer([OuterGroup(outer_factory(None, 0.5, 0.0, False))])
        self.job = Fragment("0", tensors, outer, exchange.shards(48), Terms(codec=codec))
        self.job.take_snapshot()
        tables = [self.job.table()]
        exchange.join(Schema(self.job.schema(), {"fragments": "1"}, tables))
        if isinstance(exchange, StoreExchange):
            exchange.restore([self.job])

    def learn(self):
        with torch.no_grad():
            self.parameter -= LEARNED[self.exchange.rank]
        self.job.contribution = Contribution(steps=(0, 1))
        self.job.begin()
