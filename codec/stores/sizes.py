"""Limits on the size of objects."""

from codec.errors import LimitError


def checked_size(name: str, data: bytes, most: int) -> bytes:
    """Return the bytes of an object; raise LimitError if there are more than `most`."""
    if len(data) > most:
        raise too_large(name, most)
    return data


def too_large(name: str, most: int) -> LimitError:
    """Return the error of an object with more than `most` bytes."""
    return LimitError(f"the object {name!r} in the store has more than {most} bytes")
