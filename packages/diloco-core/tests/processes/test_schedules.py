"""Whatever goes wrong, and whenever: all processes of a replica do the same, to the end."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco_core import ConfigurationError, SyncError
from diloco_core._loop._inner_loop import EXIT_CODE, TrainingProcess
from diloco_core._processes._inner_states import InnerStates
from diloco_core._processes._inside import Inside
from diloco_core._processes._leader import Leading, follow
from diloco_core._processes._moves import Mail, Progress
from diloco_core._processes._values import held_tensors, samples

PROCESSES, TENSORS = 3, 4


class Collectives:
    """Calls that all processes have to enter together; entering different ones is an error."""

    def __init__(self):
        self._barrier = threading.Barrier(PROCESSES, timeout=60)
        self._entered = [None] * PROCESSES

    def enter(self, process, kind, value):
        self._entered[process] = kind, value
        self._barrier.wait()
        entered = list(self._entered)
        self._barrier.wait()
        assert len({kind for kind, _ in entered}) == 1, entered
        return [value for _, value in entered]


class Threads:
    """The processes of a replica as threads, in place of :class:`.Inside`."""

    def __init__(self, collectives, process):
        self._collectives, self.process, self.processes = collectives, process, PROCESSES
        self.leads = process == 0

    def share(self, message=None):
        return self._collectives.enter(self.process, "share", message)[0]

    def collect(self, message):
        return self._collectives.enter(self.process, "collect", message)

    together, each = Inside.together, Inside.each

    def gather_bytes(self, file):
        return self._collectives.enter(self.process, "gather_bytes", file)

    def scatter_bytes(self, files):
        return self._collectives.enter(self.process, "scatter_bytes", files)[0][self.process]


class State:
    """An inner state, which cannot be saved or restored if it is told so."""

    def __init__(self, fails):
        self.fails = fails

    def try_out(self):
        if self.fails:
            raise ConfigurationError("it cannot be saved")

    def parts(self, *_):
        self.try_out()
        return [b"state"]

    def restore(self, *_):
        self.try_out()


class Loop:
    """The leader's loop: it takes mail, and says where it stands; syncs come while it counts."""

    def __init__(self, syncs=lambda _: None):
        self._syncs = syncs

    def progress(self):
        return Progress()

    def take(self, mails):
        assert len(mails) == PROCESSES

    def count_steps(self, number, *, last):
        self._syncs(self)


def play(script, tensors, inner, process):
    """Return what the leader does, step by step."""

    def act(_):
        for what, number in script:
            match what:
                case "ask":
                    tensors["ask"]([tensors["twin"][number]])
                case "write":
                    tensors["twin"][number].add_(1)
                case "raise":
                    raise SyncError("a peer was lost")
                case "told":
                    process._heard(15, None)
                case "try":
                    inner.try_out()
                case "save":
                    inner.state_dict()
                case "restore":
                    # As the loop does, which then looks for an older one.
                    try:
                        inner.load_state_dict({"files": [torch.zeros(3, dtype=torch.uint8)] * 3})
                    except ConfigurationError:
                        continue

    return act


STEPS = st.tuples(
    st.sampled_from(["ask", "write", "raise", "told", "try", "save", "restore"]),
    st.integers(0, TENSORS - 1),
)
PROBLEMS = st.none() | st.tuples(
    st.sampled_from(["mail", "inner", "values"]), st.integers(0, PROCESSES - 1)
)


@given(st.lists(STEPS, max_size=8), PROBLEMS, st.booleans(), st.booleans())
@example([("write", 0)], ("values", 1), False, False)
@settings(max_examples=150, deadline=None)
def test_no_process_waits_for_what_the_others_do_not_do(script, problem, everything, text):
    collectives = Collectives()
    models = [[torch.full((2,), float(number)) for number in range(TENSORS)] for _ in range(3)]
    twin = [torch.zeros(2) for _ in range(TENSORS)]
    outcomes = [None] * PROCESSES

    def member(number):
        inside = Threads(collectives, number)
        process = TrainingProcess()
        process.training, process.told_to_end = True, text
        inner = InnerStates(inside, State(problem == ("inner", number)), process)

        def mail():
            if problem == ("mail", number):
                raise SyncError("kept weights")
            return Mail(5)

        def now():
            if problem == ("values", number):
                raise SyncError("the model has changed")
            return held

        try:
            held = held_tensors(inside, models[number], twin)
            if number:
                outcomes[number] = follow(inside, now, mail, inner, 0)
                return
            wholes = [each.whole for each in held]
            leading = Leading(inside, wholes, now, process)
            own = {"twin": twin, "ask": leading.ask}
            act = play(script, own, inner, process)
            leading.loop = Loop() if everything else Loop(act)
            outcomes[0] = leading.together(act if everything else None, mail, 0)
        except BaseException as error:
            outcomes[number] = repr(error)

    threads = [threading.Thread(target=member, args=(number,)) for number in range(PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[0] is not None
    assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
    if isinstance(outcomes[0], str):
        known = ("SyncError", "ConfigurationError", f"SystemExit({EXIT_CODE})")
        assert outcomes[0].startswith(known), outcomes[0]
        # A replica that ends already is only interrupted if it is told again: it saves what it can.
        again = any(what == "told" for what, _ in script)
        assert again or not (text and "SystemExit" in outcomes[0]), script
    else:
        assert all(torch.equal(a, b) for a, b in zip(models[0], models[1], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(models[0], models[2], strict=True))


class Interrupted:
    """The processes of a replica in which Ctrl-C comes while they tell each other something."""

    def __init__(self):
        self.moves, self.common = [], None

    each = Inside.each

    def share(self, move):
        self.moves.append(type(move).__name__)

    def collect(self, _):
        raise KeyboardInterrupt


@pytest.mark.parametrize("in_a_move", [True, False])
def test_after_a_signal_in_the_middle_of_a_move_there_is_no_other_one(in_a_move):
    inside, process = Interrupted(), TrainingProcess()
    process.training = True
    leading = Leading(inside, [], list, process)

    def act(_):
        if in_a_move:
            leading.ask([])
        raise KeyboardInterrupt

    leading.loop = Loop(act)
    with pytest.raises(KeyboardInterrupt):
        leading.together(None, Mail, 0)
    assert inside.moves == ["Values" if in_a_move else "Failed"]


def test_where_nothing_is_synced_no_process_looks_at_the_model():
    inside = Interrupted()

    def now():
        raise AssertionError("it is asked for at every step")

    leading = Leading(inside, [], now, TrainingProcess())
    leading.loop = Loop()
    done = leading.together(None, Mail, 1)
    inside.share, inside.process = lambda: done, 1
    assert follow(inside, now, Mail, None, 1) is done


class Rounded:
    """A replica whose other process has rounded what it trains in another way."""

    process, processes, leads, common, each = 0, 2, True, None, Inside.each

    def __init__(self):
        self.apart = 0.0

    def share(self, message):
        """All hear it."""
        return message

    def collect(self, message):
        if not isinstance(message, Mail):
            return [message, message]
        other = {n: [value + self.apart * n for value in v] for n, v in message.samples.items()}
        return [message, replace(message, samples=other)]


def test_what_is_not_synced_yet_may_differ_by_rounding_while_nothing_moves():
    inside, process = Rounded(), TrainingProcess()
    process.training = True
    tensors = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    held = held_tensors(inside, tensors, [torch.nn.Parameter(torch.zeros(1)) for _ in tensors])
    wholes = [each.whole for each in held]
    leading = Leading(inside, wholes, lambda: held, process)
    leading.loop = Loop()
    leading.loop.take = list
    leading.together(lambda _: None, Mail, 0)
    for way in (1.0, 0.0):  # the first fragment alone is synced, and then nothing moves any more
        with torch.no_grad():
            for tensor in tensors:
                tensor.add_(way)
        inside.apart = 1e-3
        mail = partial(Mail, samples=samples(held))
        leading.loop = Loop(lambda _: leading.ask([wholes[0]]))
        leading.loop.take = list
        leading.together(None, mail, 0)
    inside.apart = 0.5
    with pytest.raises(SyncError, match="process 1 of this replica has trained its model to other"):
        leading.together(None, mail, 0)
