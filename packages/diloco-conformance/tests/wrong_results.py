"""Wrong results: R11."""

from dataclasses import replace

from toy_executor import ToyExecutor
from wrong import Restating, mutant

from diloco_protocol import BackendError, ResultLostError

AS_RETURNED = "r11_results_arrive_as_they_were_returned"
SIZE = "r11_the_declared_size_is_the_limit"


def changed(value, change):
    """A value with every part of it changed."""
    if isinstance(value, dict):
        value = {change(key): changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        value = [changed(item, change) for item in value]
    return change(value)


class Changing(ToyExecutor):
    """Base of those that change results."""

    def _result(self, handle):
        return changed(super()._result(handle), self.change)


@mutant(AS_RETURNED, "R11", "R5")
class SmallKeys(Changing):
    def change(self, value):
        return value.lower() if isinstance(value, str) and len(value) == 1 else value


@mutant(AS_RETURNED, "R11", "R5")
class StrippedTexts(Changing):
    def change(self, value):
        return value.strip(" ") if isinstance(value, str) else value


@mutant(AS_RETURNED, "R11", "R5")
class IntegersOf64Bits(Changing):
    def change(self, value):
        large = type(value) is int and abs(value) >= 2**63
        return float(min(value, 10**300)) if large else value


@mutant(AS_RETURNED, "R11", "R5")
class NumbersAreFloats(Changing):
    def change(self, value):
        exact = type(value) is int and abs(value) < 2**53
        return float(value) if exact else value


@mutant(AS_RETURNED, "R11", "R5")
class WholeFloatsAreIntegers(Changing):
    def change(self, value):
        return int(value) if type(value) is float and value.is_integer() else value


@mutant(AS_RETURNED, "R11", "R5")
class AsciiResults(Changing):
    def change(self, value):
        return value.encode("ascii", "replace").decode() if isinstance(value, str) else value


@mutant(AS_RETURNED, "R11", "R5")
class DeepValuesAreCut(ToyExecutor):
    def _result(self, handle):
        def cut(value, depth):
            if depth > 100:
                return None
            if isinstance(value, list):
                return [cut(item, depth + 1) for item in value]
            if isinstance(value, dict):
                return {key: cut(item, depth + 1) for key, item in value.items()}
            return value

        return cut(super()._result(handle), 0)


@mutant(SIZE, "R11", "R5")
class LargeResultsAreCut(ToyExecutor):
    def _result(self, handle):
        result = super()._result(handle)
        return result[:100_000] if isinstance(result, str) else result


class Declaring(ToyExecutor):
    """Base of those that declare another size."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        size = self.declare(self.capabilities.max_result_bytes)
        self.capabilities = replace(self.capabilities, max_result_bytes=size)


@mutant(SIZE, "R11")
class DeclaresTooMuch(Declaring):
    def declare(self, size):
        return size + 1


@mutant(SIZE, "R11")
class DeclaresTooLittle(Declaring):
    def declare(self, size):
        return size - 1


@mutant("r5_large_results_arrive", "R11")
class DeclaresNoLimit(Declaring):
    def declare(self, size):
        return None


@mutant(SIZE, "R11")
class DoesNotSayHowLarge(Restating):
    def restate(self, handle, status, seen):
        large = "bytes of JSON" in status.message
        return replace(status, message="the result is too large") if large else status


@mutant("r6_a_result_that_cannot_be_read_is_not_lost", "R6")
class WhatCannotBeReadIsLost(ToyExecutor):
    def _result(self, handle):
        try:
            return super()._result(handle)
        except BackendError as error:
            raise ResultLostError(str(error)) from error
