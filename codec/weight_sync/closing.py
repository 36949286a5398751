"""Base class of objects that are closed when a ``with`` block ends."""

from abc import ABC, abstractmethod
from typing import Any, Self


class Closing(ABC):
    """Object with a method ``close()``; as a context manager, it is closed at the end of the block."""

    @abstractmethod
    def close(self) -> None:
        """Release what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
