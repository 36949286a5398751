"""Base class of objects that are closed when a ``with`` block ends."""

from typing import Any, Self


class Closing:
    """Object with a method ``close()``; as a context manager, it is closed at the end of the block."""

    def close(self) -> None:
        """Release what the object holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
