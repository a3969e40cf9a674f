"""Errors that only use shows: changed results, other handles of a run, odd names and mixtures."""

import contextlib
import json
import re
import unicodedata
from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import Telling, mutant

from diloco_protocol import BackendError, InvalidRequestError, ReplicaNotFoundError

WHOLE = "c6_every_handle_purges_its_whole_run"
LIVES = "c6_purge_is_refused_while_something_lives"
ANSWER = "r3_what_a_caller_makes_of_it_changes_nothing"
TIME = "s13_no_time_is_taken_from_it"
LONGEST = "h8_the_longest_names_are_different_runs"
ORDER = "r1_results_follow_the_handles"
AS_THEY_ARE = "g1_lines_arrive_as_they_are"
APART = "g4_the_streams_are_kept_apart"
LEFT = "r12_whatever_is_left_is_data"
TEXTS = "s16_texts_can_be_printed"


# --- what callers hand in, and get ---


@mutant("l6_replicas_are_told_who_they_are", "L6")
class CompletesTheArgumentsOfTheCaller(ToyExecutor):
    def launch_replicas(self, n_replicas, entrypoint, entrypoint_args=None, **options):
        handles = super().launch_replicas(n_replicas, entrypoint, entrypoint_args, **options)
        if entrypoint_args is not None:
            entrypoint_args.setdefault("run", handles[0].run_id)
        return handles


@mutant("e1_every_variable_arrives_as_it_was_given", "L6")
class CompletesTheVariablesOfTheCaller(ToyExecutor):
    def launch_replicas(self, *arguments, env=None, **options):
        handles = super().launch_replicas(*arguments, env=env, **options)
        if env is not None:
            env["DILOCO_RUN_ID"] = handles[0].run_id
        return handles


class Keeping(ToyExecutor):
    """Base of those that keep what they have given."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = {}


@mutant(ANSWER, "R3")
class KeepsTheResultItGives(Keeping):
    def _result(self, handle):
        if handle not in self.kept:
            self.kept[handle] = super()._result(handle)
        return self.kept[handle]


@mutant(ANSWER, "R3")
class KeepsTheEntryItGives(Keeping):
    def collect(self, handles, **options):
        entries = super().collect(handles, **options)
        for place, entry in enumerate(entries):
            if entry["status"] == "succeeded":
                entries[place] = self.kept.setdefault((entry["run_id"], entry["rank"]), entry)
        return entries


@mutant(ORDER, "R1")
class SaysMoreThanAnyPageNames(ToyExecutor):
    def collect(self, handles, **options):
        entries = super().collect(handles, **options)
        return [{**entry, "node": "node-1"} for entry in entries]


@mutant(ORDER, "R1")
class ForgetsWhereItsReplicasAre(ToyExecutor):
    def collect(self, handles, **options):
        entries = zip(handles, super().collect(handles, **options), strict=True)
        return [
            {key: value for key, value in entry.items() if key not in handle.metadata}
            for handle, entry in entries
        ]


@mutant(ORDER, "R1")
class CollectsListsAlone(ToyExecutor):
    def collect(self, handles, **options):
        if not isinstance(handles, list):
            raise InvalidRequestError("handles must be a list")
        return super().collect(handles, **options)


@mutant(ORDER, "R1")
class ReadsTheHandlesTwice(ToyExecutor):
    def collect(self, handles, **options):
        for handle in handles:
            self._check(handle)
        return super().collect(handles, **options)


@mutant(ORDER, "R1")
class NothingToCollectIsAnError(ToyExecutor):
    def collect(self, handles, **options):
        if isinstance(handles, list) and not handles:
            raise BackendError("there are no handles")
        return super().collect(handles, **options)


@mutant("c8_close_ends_nothing", "C8")
class AWithStatementEndsEverything(ToyExecutor):
    def __exit__(self, *error):
        for run_id in self.list_runs():
            self.cancel_run(run_id)


# --- any handle of a run ---


@mutant(WHOLE, "C9")
class PurgesByTheFirstHandleAlone(ToyExecutor):
    def _purge(self, handle):
        if handle.rank == 0:
            super()._purge(handle)


@mutant(WHOLE, "C9")
class PurgesOneRank(ToyExecutor):
    def _purge(self, handle):
        jobs = self._jobs(handle.run_id)
        if handle.rank == 0 or any(job.live for job in jobs.values()):
            super()._purge(handle)
        elif handle in jobs:
            self._delete(handle)


@mutant(LIVES, "C6")
class WhoIsBeingEndedIsPurged(ToyExecutor):
    def _purge(self, handle):
        jobs = self._jobs(handle.run_id)
        if any(job.live and not job.stopping for job in jobs.values()):
            raise InvalidRequestError("cancel it first")
        for one in jobs:
            self._delete(one)


@mutant(LIVES, "C6")
class OnlyTheGivenRankMustHaveEnded(ToyExecutor):
    def _purge(self, handle):
        jobs = self._jobs(handle.run_id)
        if handle in jobs and jobs[handle].live:
            raise InvalidRequestError("cancel it first")
        for one in jobs:
            self._delete(one)


# --- times and names ---


class Timing(Telling):
    """Base of those that ask the platform for another timeout."""

    def tell(self, body):
        if body["timeout"] is not None:
            body["timeout"] = self.rounded(body["timeout"])


@mutant(TIME, "S13")
class WholeSeconds(Timing):
    def rounded(self, timeout):
        return float(int(timeout))


@mutant(TIME, "S13")
class WholeMinutes(Timing):
    def rounded(self, timeout):
        return max(60.0, timeout // 60 * 60)


@mutant(LONGEST, "H8")
class RefusesLongNames(ToyExecutor):
    def _check_request(self, request):
        super()._check_request(request)
        if len(request.run_id) > 40:
            raise InvalidRequestError("names have 40 characters at most")


@mutant(LONGEST, "H8")
class CutsLongNames(ToyExecutor):
    def _find(self, run_id):
        found = [one for one in self._list_runs() if one[:40] == run_id[:40]]
        if not found:
            raise ReplicaNotFoundError(f"there is no run {run_id!r}")
        return self._attach(found[-1])


# --- lines ---


class Altering(ToyExecutor):
    """Base of those that give other lines."""

    def _logs(self, handle, query):
        return iter(self.altered(list(super()._logs(handle, query))))


@mutant(AS_THEY_ARE, "G1")
class WhatWasSaidIsNotRepeated(Altering):
    """As those do that read a log again after a broken connection, and drop what they know."""

    def altered(self, lines):
        return [line for place, line in enumerate(lines) if not line or line not in lines[:place]]


@mutant(AS_THEY_ARE, "G1")
class EqualLinesInARowAreOne(Altering):
    def altered(self, lines):
        return [line for place, line in enumerate(lines) if lines[place - 1 : place] != [line]]


@mutant(AS_THEY_ARE, "G1")
class LinesThatSoundLikeItsOwnAreDropped(Altering):
    def altered(self, lines):
        return [line for line in lines if not line.startswith("diloco")]


@mutant(AS_THEY_ARE, "G1")
class CharactersAreNormalised(Altering):
    def altered(self, lines):
        return [unicodedata.normalize("NFC", line) for line in lines]


@mutant("r11_results_arrive_as_they_were_returned", "R11")
class ResultsAreNormalised(ToyExecutor):
    def _result(self, handle):
        text = json.dumps(super()._result(handle), ensure_ascii=False)
        return json.loads(unicodedata.normalize("NFC", text))


@mutant("r11_results_arrive_as_they_were_returned", "R11")
class WholeNumbersAreInts(ToyExecutor):
    def _result(self, handle):
        result = super()._result(handle)
        return int(result) if isinstance(result, float) and result.is_integer() else result


@mutant("g7_attempts_are_not_mixed", "G7")
class WhoWaitsForTheNextAttemptHasNoLog(ToyExecutor):
    def _logs(self, handle, query):
        job = self._job(handle)
        if job.attempt > 1 and job.status == "QUEUED":
            raise ReplicaNotFoundError("it has not started")
        return super()._logs(handle, query)


@mutant(APART, "G4")
class FollowsBothStreams(ToyExecutor):
    def _logs(self, handle, query):
        return super()._logs(handle, replace(query, streams="combined") if query.follow else query)


@mutant(APART, "G4")
class SearchesBothStreamsAlone(ToyExecutor):
    def _logs(self, handle, query):
        return super()._logs(
            handle, query if query.streams == "combined" else replace(query, regex=None)
        )


# --- what is found in place of a result ---


class Reading(ToyExecutor):
    """Base of those that look into what a job has left."""

    def _result(self, handle):
        self.look(self._job(handle).outputs.get(self._job(handle).attempt, b"null"))
        return super()._result(handle)


@mutant(LEFT, "R12")
class ReadsWithoutADepth(Reading):
    def look(self, text):
        with contextlib.suppress(ValueError):
            json.loads(text)


@mutant(LEFT, "R12")
class BelievesInItsOwnKeys(Reading):
    def look(self, text):
        if text[:1] == b"{" and text[-1:] == b"}":
            json.loads(text).get("result_lines", 0) + 1


# --- texts ---


@mutant(TEXTS, "S16")
class MessagesAreRed(ToyExecutor):
    def describe(self, handle):
        status = super().describe(handle)
        return replace(status, message=f"\x1b[31m{status.message}\x1b[0m")


@mutant(TEXTS, "S16")
class ErrorsClearTheScreen(ToyExecutor):
    def collect(self, handles, **options):
        entries = super().collect(handles, **options)
        for entry in entries:
            if entry["error"]:
                entry["error"] = re.sub("^", "\x1b[2J", entry["error"])
        return entries
