"""The names of RPCs, which methods are named after."""

from __future__ import annotations

from modal_proto import api_pb2


def test_every_method_answers_an_rpc_of_the_service(lab):
    service = api_pb2.DESCRIPTOR.services_by_name["ModalClient"]
    names = set(lab.stand_in._serving._api._rpcs)
    assert len(names) == 52
    assert names <= {method.name for method in service.methods}
