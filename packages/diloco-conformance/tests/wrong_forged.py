"""Wrong beliefs in handles: H10."""

import fnmatch
import posixpath

from toy_executor import ToyExecutor, ask
from wrong import Believing, mutant

from diloco_protocol import ReplicaNotFoundError

TWO = "h10_a_handle_of_two_runs"
ANY = "h10_a_handle_of_any_text"
NAMES = "h10_a_run_id_of_any_text"
NONE = "h10_what_is_no_handle_is_refused"
OURS = "h10_a_handle_leads_only_to_what_is_ours"


@mutant(TWO, "H10")
class EndsWhateverItLeadsTo(Believing):
    pass


class Whole(Believing):
    """Base of those that end only what is of the handle's run, and otherwise take its word."""

    def _stop(self, handle):
        if handle.metadata["name"] == f"{handle.run_id}-{handle.rank}":
            super()._stop(handle)


@mutant(TWO, "H10")
class ShowsTheLogOfAnotherRun(Whole):
    def _logs(self, handle, query):
        job = self.cloud.find(handle.metadata)
        if job is None:
            raise ReplicaNotFoundError("there is no such job")
        return iter([chunk.data.decode() for chunk in job.log])


@mutant(TWO, "H10")
class ShowsTheResultOfAnotherRun(Whole):
    def _observe_run(self, handles):
        jobs = {handle: self.cloud.find(handle.metadata) for handle in handles}
        return {handle: self._status(job) for handle, job in jobs.items() if job is not None}

    def _result(self, handle):
        (found,) = (one for one in self._attach_all() if one.metadata == handle.metadata)
        return super()._result(found)

    def _attach_all(self):
        return [handle for run_id in self._list_runs() for handle in self._attach(run_id)]


@mutant(TWO, "H10")
class PurgesWhateverItLeadsTo(Whole):
    def _purge(self, handle):
        job = self.cloud.find(handle.metadata)
        if job is not None and not job.live:
            self._delete(handle)


class ById(ToyExecutor):
    """Base of those that look for a job by another rule than the handle's name and uid together."""

    def _check_handle(self, handle):
        pass

    def _stop(self, handle):
        for name, job in list(self.cloud.jobs.items()):
            if job.live and self.meant(handle, name, job):
                ask(lambda n=name, uid=job.uid: self.cloud.stop(n, uid))


@mutant(ANY, "H10")
class NoUidIsEveryUid(ById):
    def meant(self, handle, name, job):
        uid = handle.metadata["uid"]
        return name.startswith(handle.metadata["name"]) and uid in {"", job.uid}


@mutant(ANY, "H10")
class NamesArePatterns(ById):
    def meant(self, handle, name, job):
        return fnmatch.fnmatch(name, handle.metadata["name"])


@mutant(ANY, "H10")
class NamesArePaths(ById):
    def meant(self, handle, name, job):
        path = f"/jobs/{handle.run_id}/{handle.rank}"
        return posixpath.normpath(path) == f"/jobs/{job.body['run_id']}/{job.body['spec']['rank']}"


@mutant(ANY, "H10")
class HalfACharacterIsAnError(ToyExecutor):
    """As where a name becomes part of a header or of a path."""

    def _check_handle(self, handle):
        "".join(handle.metadata.values()).encode()
        super()._check_handle(handle)


@mutant(ANY, "H10")
class ANulIsAValueError(ToyExecutor):
    def _check_handle(self, handle):
        if "\0" in "".join(handle.metadata.values()):
            raise ValueError("embedded null byte")
        super()._check_handle(handle)


@mutant(ANY, "H10")
class UidsAreNumbers(ToyExecutor):
    def _check_handle(self, handle):
        int(handle.metadata["uid"], 16)
        super()._check_handle(handle)


@mutant(NAMES, "H10", "H8", "H6")
class FindsRunsByPattern(ToyExecutor):
    def _find(self, run_id):
        found = [one for one in self._list_runs() if fnmatch.fnmatch(one, str(run_id))]
        if not found:
            raise ReplicaNotFoundError(f"there is no run {run_id!r}")
        return self._attach(found[0])


@mutant(NAMES, "H10")
class ANameThatIsNoTextIsATypeError(ToyExecutor):
    def _find(self, run_id):
        return self._attach(run_id + "")


@mutant(NAMES, "H10")
class ANameThatIsNoneIsAFaultOfTheBackend(ToyExecutor):
    def exists(self, run_id):
        try:
            return super().exists(run_id)
        except ValueError:
            return bool(run_id)


@mutant(NONE, "H10")
class TakesWhateverHasTheAttributes(ToyExecutor):
    def _check(self, handle):
        if handle.backend_name == self.backend_name:
            self._check_handle(handle)


@mutant(NONE, "H10")
class CancelPassesOverWhatIsNone(ToyExecutor):
    def cancel(self, handle):
        if hasattr(handle, "rank"):
            super().cancel(handle)


@mutant(OURS, "H10")
class EndsAJobOfTheName(ById):
    def meant(self, handle, name, job):
        return name == f"{handle.run_id}-{handle.rank}" and handle.metadata["uid"] in {"", job.uid}


@mutant(OURS, "H10")
class PurgesAJobOfTheName(ToyExecutor):
    def _purge(self, handle):
        name = f"{handle.run_id}-{handle.rank}"
        if not handle.metadata["uid"] and name in self.cloud.jobs:
            ask(lambda: self.cloud.delete(name, self.cloud.jobs[name].uid))
        super()._purge(handle)
