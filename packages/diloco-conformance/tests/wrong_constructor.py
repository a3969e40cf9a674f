"""Constructors that drop what they are given: L12."""

from toy_executor import ToyExecutor
from wrong import mutant

from diloco_protocol import FolderJournal

VARIABLES = "l12_the_environment_of_the_constructor_is_in_every_launch"
JOURNAL = "l12_the_journal_of_the_constructor_is_written_and_read"
PURGE = "l12_a_purge_writes_into_the_journal_what_nobody_has_seen"
STORE = "l12_a_journal_in_a_store_is_never_above_the_backend"
LOG = "l12_a_journal_keeps_the_log_of_who_is_cancelled"
NAMES = "l12_names_begin_as_the_constructor_says"


@mutant(VARIABLES, "L12")
class DropsItsEnvironment(ToyExecutor):
    def __init__(self, cloud, *, env=None, **options):
        super().__init__(cloud, **options)


@mutant(VARIABLES, "L12")
class TakesNoEnvironment(ToyExecutor):
    def __init__(self, cloud, *, backoff, journal=None, run_id=None):
        super().__init__(cloud, backoff=backoff, journal=journal, run_id=run_id)


@mutant(VARIABLES, "L12")
class ItsEnvironmentWins(ToyExecutor):
    def _request(self, *arguments, **options):
        options["env"] = {**(options.get("env") or {}), **self._env}
        return super()._request(*arguments, **options)


@mutant(VARIABLES, "L12")
class ItsEnvironmentIsADefault(ToyExecutor):
    """A launch with variables of its own has only those."""

    def _request(self, *arguments, **options):
        kept, self._env = self._env, {} if options.get("env") else self._env
        try:
            return super()._request(*arguments, **options)
        finally:
            self._env = kept


@mutant(VARIABLES, "L12")
class ItsEnvironmentIsAddedWhenItIsSent(ToyExecutor):
    """It is in no comparison, so that a launch with other variables is the same launch."""

    def __init__(self, cloud, *, env=None, **options):
        super().__init__(cloud, **options)
        self.more = env or {}

    def _bodies(self, request):
        bodies = super()._bodies(request)
        for body in bodies:
            body["env"] = {**self.more, **body["env"]}
        return bodies


@mutant(JOURNAL, "L12")
class DropsItsJournal(ToyExecutor):
    def __init__(self, cloud, *, journal=None, **options):
        super().__init__(cloud, **options)


@mutant(JOURNAL, "L12")
class WritesLaunchesOnly(ToyExecutor):
    def _write_end(self, journal, handle, status):
        pass


@mutant(PURGE, "L12")
class PurgesWithoutWriting(ToyExecutor):
    def purge(self, handle):
        self._check(handle)
        self._purge(handle)


@mutant(JOURNAL, "L12", "H4", "R12", "H5")
class HasAJournalOfItsOwn(ToyExecutor):
    def __init__(self, cloud, *, journal=None, **options):
        own = None if journal is None else FolderJournal(journal.folder / "own")
        super().__init__(cloud, journal=own, **options)


@mutant(STORE, "S4", "L12")
class BelievesEveryJournal(ToyExecutor):
    def _ends(self, handles):
        return self._all_recorded(handles)


@mutant(STORE, "L12")
class SaysNothingOfTheLaunch(ToyExecutor):
    def _record_launch(self, request, handles):
        if self._journal is not None:
            self._journal.record_launch(handles)


@mutant(LOG, "L12")
class KeepsNoLog(ToyExecutor):
    def _keep_logs(self, logs):
        pass


@mutant(NAMES, "L12")
class DropsItsPrefix(ToyExecutor):
    def __init__(self, cloud, *, run_id=None, **options):
        super().__init__(cloud, **options)
