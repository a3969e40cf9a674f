"""As many sequences of the toy backend as a user's own backend gets."""

import pytest
import test_toy

from diloco_conformance import ExecutorConformance


@pytest.mark.slow
@pytest.mark.parametrize("toy", [test_toy.TestToy, test_toy.TestToyGang])
def test_any_sequence_keeps_every_promise(toy, request):
    class Long(toy):
        examples = ExecutorConformance.examples

    Long().test_any_sequence_keeps_every_promise(request)
