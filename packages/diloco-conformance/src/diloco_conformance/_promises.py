"""The promises of every executor, and the errors raised when one is broken."""

from __future__ import annotations

PROMISES = {
    "S1": "A state is one of the five.",
    "S2": "A terminal state is never left.",
    "S3": "States go forward: running becomes pending again only with the next attempt.",
    "S4": "poll says what is true.",
    "S5": (
        "A replica is cancelled only after a cancel or an outside stop, and only when its "
        "resources are gone."
    ),
    "S6": "Unknown is an exception, never a state.",
    "S7": "A timeout is a failure with reason 'timeout'.",
    "S8": "Reason, exit code and attempt are the true ones, and describe agrees with poll.",
    "S9": "A failure changes the siblings only where the declared failure scope says so.",
    "S10": "A reason belongs to its state, and what has not ended has no exit code.",
    "S11": "What a signal has ended has exit code 128 + its number, and its name.",
    "S12": (
        "Times are Unix seconds: what runs has a start, what has ended has an end, and "
        "nothing else has them."
    ),
    "S13": (
        "The timeout counts each attempt from its start, and without a timeout a replica runs on."
    ),
    "S14": "Records are kept after the end for as long as is declared.",
    "S15": "What was stopped from outside is cancelled, and the reason says by whom.",
    "S16": "Texts for people hold no control characters but newline and tab.",
    "C1": (
        "Cancelling twice is cancelling once, and cancelling what has ended or is gone is no error."
    ),
    "C2": "Cancel changes nothing that has ended.",
    "C3": "Cancel ends exactly what the declared scope says.",
    "C4": (
        "Cancel returns only if the backend has accepted; otherwise it raises and nothing "
        "has changed."
    ),
    "C5": "What is cancelled ends, and a success or failure that won the race stays.",
    "C6": "Cancel keeps the evidence; purge removes it, and only of runs that have ended.",
    "C7": (
        "cancel_run ends all that lives of a run and nothing else; an unknown run is a "
        "ReplicaNotFoundError."
    ),
    "C8": "close may be repeated, and ends nothing.",
    "C9": "Purge returns only when the records are gone; otherwise it raises and can be repeated.",
    "R1": (
        "collect returns one result per handle, in the given order: a dict with the keys of "
        "ReplicaResult and the metadata of the handle, and no others."
    ),
    "R2": "collect returns by its deadline and never ends a replica.",
    "R3": "collect is repeatable: a terminal result is the same every time, and agrees with poll.",
    "R4": "exit_code is 0 exactly if the replica succeeded.",
    "R5": "A success comes with the result of that very replica.",
    "R6": "collect absorbs errors that pass until its deadline, and raises the others.",
    "R7": "In collect a replica without a record is failed with reason 'lost', never a success.",
    "R11": (
        "A result arrives as it was returned, up to the declared size; a larger one is a "
        "failure that says so."
    ),
    "R12": (
        "A success whose result is lost or damaged says so in its error, and the other "
        "results are still returned."
    ),
    "R8": "The calls of one look grow with the runs, not with the ranks.",
    "R9": "Without a timeout, collect waits until all have ended, and then returns at once.",
    "R10": (
        "Reason, attempt and signal in collect are those of describe, and who has not "
        "succeeded has no result."
    ),
    "L1": "A launch gives the ranks in order, and handles that no other replica has.",
    "L2": "A launch is all or nothing: what an error leaves alive is in LaunchError.survivors.",
    "L3": "The same run_id means the same replicas, and another launch under it is refused.",
    "L4": "A wrong argument is an error before anything is called.",
    "L5": "plan calls nothing and says what launch sends.",
    "L6": (
        "A replica is told its rank, the world size and exactly the arguments given; the "
        "caller's own stay as they are."
    ),
    "L7": (
        "A launch that differs in any argument from that of the same run_id is refused, and "
        "changes nothing."
    ),
    "L8": "A part of a run has the ranks it was launched with, and the size of the whole run.",
    "L9": (
        "A failed attempt is started again as often as max_restarts says, or the launch is refused."
    ),
    "L10": (
        "CPUs, memory, GPUs and spot capacity are asked of the platform as they were given, "
        "or the launch is refused."
    ),
    "L11": (
        "While a run is being removed, a launch of its name waits or is refused, and is "
        "never given its handles."
    ),
    "L12": (
        "What a constructor is given holds for each launch: env, the prefix of names, the journal."
    ),
    "E1": "A replica finds every environment variable as it was given.",
    "E2": (
        "A replica finds its run, its attempt, its rank and the rendezvous under the names "
        "that the launch says; and its backend and a place that its handle names."
    ),
    "E3": (
        "A secret arrives by its reference; what cannot be resolved is refused, or does not start."
    ),
    "E4": "What is secret is in no plan, handle, status, result, error or log.",
    "E5": "What was launched carries its labels.",
    "H1": "A handle survives JSON and is a key of a dict.",
    "H2": "An executor that has seen nothing answers the same.",
    "H3": "list_runs and attach find every run again, with the same handles.",
    "H4": (
        "A handle of a purged run is never that of a later run of the same name: in no verb, "
        "and in no journal."
    ),
    "H5": "Every verb refuses a handle of another backend, account, cluster or host.",
    "H6": (
        "exists says whether the backend has records of a run; exists, list_runs and attach "
        "raise if it cannot be asked."
    ),
    "H7": "list_runs gives every run once, oldest first, however many there are.",
    "H8": "Runs whose names begin alike are told apart, and so are more than ten ranks.",
    "H9": (
        "A handle that is incomplete or leads nowhere has a named error, and what diloco has "
        "not launched is no run."
    ),
    "H10": (
        "Whatever text a handle holds, no run but the one it names is touched or shown, and "
        "every error is a BackendError."
    ),
    "H11": (
        "meets_at says with which rendezvous_uri a replica was launched, by the backend's own "
        "records: in every process, and of no other run."
    ),
    "T1": "Threads that share an executor get the same answers as one after the other.",
    "T2": "Those who launch one run_id at the same time get one run.",
    "G1": "A log has the lines that the replica wrote, and no others.",
    "G2": "A line ends at a newline alone, and everything else in it arrives as it was written.",
    "G3": "A log that is followed has every line once, and ends when the replica has ended.",
    "G4": "since, until, regex and streams choose the lines that they say.",
    "G5": "stream_logs gives as many of the last lines as it is asked for, 200 by default.",
    "G6": "A log that is gone or cannot be read is an exception, never an empty one.",
    "G7": "Logs of siblings, attempts and runs are not mixed.",
    "D1": "What a backend cannot do is declared.",
    "D2": "What is not declared does not happen: no preemption, no second attempt.",
    "D3": "check starts nothing, and says what it has found.",
}
"""Every promise by its id, in one sentence."""


class PromiseBroken(AssertionError):  # noqa: N818 - it says what happened
    """The error raised when an executor breaks a promise.

    Attributes:
        promise: Its id in :data:`PROMISES`.
    """

    def __init__(self, promise: str, said: str, true: str, history: list[str]) -> None:
        self.promise = promise
        self.said, self.true = said, true
        steps = (
            "\n".join(f"    {number}. {step}" for number, step in enumerate(history, 1))
            or "    (nothing)"
        )
        super().__init__(
            f"{promise} is broken. {PROMISES[promise]}\n  The backend said: {said}\n  True is: "
            f"{true}\n  After:\n{steps}"
        )


class HarnessFault(Exception):  # noqa: N818 - it says whose fault it is
    """The error raised when a harness did not do, or did not tell, what it was asked.

    The harness is wrong then, not the executor.
    """
