"""Readers are closed where their ``with`` block ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Something that is closed at the end of its ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds; repeatable."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
