"""Signatures of updates and of lists of updates, by a key that trainer and receivers share (weight-updates.md)."""

import re
from typing import Any

from codec.errors import FrameError
from codec.files.signing import NBYTES, SigningKey

_MAGIC = b"\x89CWS\r\n\x1a\n"
_NBYTES = len(_MAGIC) + NBYTES  # size of the signature that follows an update
_UPDATE, _LIST = b"codec update\n", b"codec list\n"  # purposes of signatures
_END = re.compile(rb', "signature": "([0-9a-f]{64})"\}')  # end of a signed list
_END_NBYTES = len(b', "signature": ""}') + 2 * NBYTES


def signed(data: Any, key: SigningKey) -> bytes:
    """Return the bytes that follow an update as its signature.

    Parameters
    ----------
    data : buffer
        Bytes of the update.
    key : SigningKey
        Key of the trainer.
    """
    return _MAGIC + key.sign(_UPDATE, [data])


def signature_in(rest: memoryview) -> bytes | None:
    """Return the signature in the bytes that follow an update; None if they are something else."""
    found = bytes(rest) if len(rest) == _NBYTES else b""
    return found.removeprefix(_MAGIC) if found.startswith(_MAGIC) else None


def check_signature(data: memoryview, signature: bytes | None, key: SigningKey) -> None:
    """Check the signature of an update.

    Parameters
    ----------
    data : memoryview
        Bytes of the update, with those of the signature.
    signature : bytes or None
        Signature in `data`.
    key : SigningKey
        Key of the trainer.

    Raises
    ------
    FrameError
        The update has no signature, or that of other bytes or of another key.
    """
    if signature is None:
        raise FrameError(
            "the update is not signed, but this object was made with a key: sign it by sign= of the trainer"
        )
    if not key.matches(signature, _UPDATE, [data[:-_NBYTES]]):
        raise FrameError(
            "the signature of the update does not match: the update was changed on the way, or signed with another key"
        )


def signed_list(body: bytes, key: SigningKey) -> bytes:
    """Return a list of updates, a JSON object, with its signature as the last entry."""
    return body[:-1] + b', "signature": "%s"}' % key.sign(_LIST, [body]).hex().encode()


def check_list(body: bytes, key: SigningKey) -> None:
    """Check the signature of a list of updates.

    Raises
    ------
    FrameError
        The list has no signature, or that of another list or of another key.
    """
    found = _END.fullmatch(body[-_END_NBYTES:])
    if found is None:
        raise FrameError(
            "the list of updates is not signed, but this object was made with a key: make the Publisher with sign=, "
            "and with an empty folder"
        )
    if not key.matches(bytes.fromhex(found[1].decode()), _LIST, [body[:-_END_NBYTES], b"}"]):
        raise FrameError(
            "the signature of the list of updates does not match: the list was changed on the way, or signed with "
            "another key"
        )
