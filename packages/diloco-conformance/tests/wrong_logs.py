"""Wrong lines of logs: G1 and G2."""

import re

from toy_executor import ToyExecutor, ask
from wrong import mutant

from diloco_protocol import UnavailableError

WROTE = "g1_a_log_has_what_the_replica_wrote"
AS_THEY_ARE = "g1_lines_arrive_as_they_are"
NEWLINES = "g2_only_a_newline_ends_a_line"
LONG = "g2_long_lines_arrive_whole"
PIECES = "g2_characters_arrive_in_pieces"
LAST = "g2_a_last_line_needs_no_newline"


class Changing(ToyExecutor):
    """Base of those that give other lines than they have read."""

    def change(self, line):
        return [line]

    def _lines(self, handle, query):
        for time, line in super()._lines(handle, query):
            for changed in self.change(line):
                yield time, changed


class Joining(ToyExecutor):
    """Base of those that make lines of all the bytes at once."""

    def _lines(self, handle, query):
        names = (handle.metadata["name"], handle.metadata["uid"])
        chunks = ask(lambda: self.cloud.log(*names))
        yield from ((0.0, line) for line in self.split(chunks))

    def split(self, chunks):
        *lines, rest = b"".join(chunk.data for chunk in chunks).split(b"\n")
        return [line.decode(errors="replace") for line in [*lines, *([rest] if rest else [])]]


# --- what was written ---


@mutant("g1_no_log_is_no_text", "G1")
class PlaceholderLogs(ToyExecutor):
    def stream_logs(self, handle, **options):
        return super().stream_logs(handle, **options) or "(no logs yet)"


@mutant("g1_no_log_is_no_text", "G1")
class WaitsForTheFirstLine(ToyExecutor):
    def _logs(self, handle, query):
        lines = list(super()._logs(handle, query))
        if not lines:
            raise UnavailableError("there is no log yet")
        return iter(lines)


@mutant(WROTE, "G1")
class TooManyLines(ToyExecutor):
    def stream_logs(self, handle, *, n_lines=200):
        return super().stream_logs(handle, n_lines=200)


@mutant(WROTE, "G1")
class TheSiblingsLog(ToyExecutor):
    def stream_logs(self, handle, **options):
        return super().stream_logs(self._attach(handle.run_id)[0], **options)


@mutant(WROTE, "G1")
class LogsOfTheLiving(ToyExecutor):
    def stream_logs(self, handle, **options):
        return super().stream_logs(handle, **options) if self._job(handle).live else ""


@mutant(AS_THEY_ARE, "G1")
class SkipsEmptyLines(Changing):
    def change(self, line):
        return [line] if line else []


@mutant(AS_THEY_ARE, "G1")
class StripsLines(Changing):
    def change(self, line):
        return [line.strip()]


@mutant(AS_THEY_ARE, "G1")
class OnlyAscii(Changing):
    def change(self, line):
        return [line.encode("ascii", "replace").decode()]


@mutant(AS_THEY_ARE, "G1")
class NumbersItsLines(ToyExecutor):
    def log_iter(self, handle, **options):
        lines = super().log_iter(handle, **options)
        return (f"[{handle.rank}] {line}" for line in lines)


@mutant("g1_a_stream_that_is_not_there_is_an_error", "G1")
class AnyStream(ToyExecutor):
    def log_iter(self, handle, *, streams="combined", **options):
        return super().log_iter(handle, **options)


# --- lines ---


@mutant(NEWLINES, "G2")
class SplitsWhereverPythonDoes(Changing):
    def change(self, line):
        return line.splitlines() or [""]


@mutant(NEWLINES, "G2")
class CarriageReturnsEndLines(Changing):
    def change(self, line):
        return line.split("\r")


@mutant(NEWLINES, "G2")
class WindowsLineEnds(Changing):
    def change(self, line):
        return [line.removesuffix("\r")]


@mutant(NEWLINES, "G2")
class NoColours(Changing):
    def change(self, line):
        return [re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line)]


@mutant(NEWLINES, "G2")
class NoControlCharacters(Changing):
    def change(self, line):
        return ["".join(one for one in line if one == "\t" or one >= " ")]


@mutant(NEWLINES, "G2")
class EndsAtNul(Changing):
    def change(self, line):
        return [line.partition("\0")[0]]


@mutant(NEWLINES, "G2")
class NoByteOrderMark(Changing):
    def change(self, line):
        return [line.removeprefix("\ufeff")]


@mutant(NEWLINES, "G2")
class TakesAwayTimeStamps(Changing):
    def change(self, line):
        return [re.sub(r"^\d{4}-\d\d-\d\dT[0-9:.]+Z ", "", line)]


@mutant(NEWLINES, "G2")
class NoBlanksAtTheEnd(Changing):
    def change(self, line):
        return [line.rstrip(" ")]


@mutant(LONG, "G2")
class CutsLongLines(Changing):
    def change(self, line):
        return [line[:65_536]]


@mutant(LONG, "G2")
class BreaksLongLines(Changing):
    def change(self, line):
        return [line[start : start + 16_384] for start in range(0, max(1, len(line)), 16_384)]


@mutant(LONG, "G2")
class DecodesEveryBlock(Joining):
    def split(self, chunks):
        data = b"".join(chunk.data for chunk in chunks)
        blocks = [data[start : start + 65_537] for start in range(0, len(data), 65_537)]
        text = "".join(block.decode(errors="replace") for block in blocks)
        return text.split("\n")[: None if text and not text.endswith("\n") else -1]


@mutant(PIECES, "G2")
class DecodesEveryChunk(Joining):
    def split(self, chunks):
        text = "".join(chunk.data.decode(errors="replace") for chunk in chunks)
        return text.split("\n")[: None if text and not text.endswith("\n") else -1]


@mutant(PIECES, "G2")
class EveryChunkIsALine(Joining):
    def split(self, chunks):
        return [line for chunk in chunks for line in chunk.data.decode("latin-1").splitlines()]


@mutant(LAST, "G2")
class LosesWhatIsNotFinished(Joining):
    def split(self, chunks):
        return b"".join(chunk.data for chunk in chunks).decode(errors="replace").split("\n")[:-1]


@mutant(LAST, "G2")
class EndsWithAnEmptyLine(Joining):
    def split(self, chunks):
        lines = super().split(chunks)
        return [*lines, ""] if chunks and not chunks[-1].data.endswith(b"\n") else lines
