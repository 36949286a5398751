"""Signatures of updates and of lists of updates, by the trainer's key (weight-updates.md)."""

import re
from typing import Any

from codec.errors import FrameError
from codec.files.signing import SigningKey, is_signature

_MAGIC = b"\x89CWS\r\n\x1a\n"
_UPDATE, _LIST = b"codec update", b"codec list"  # purposes of signatures
_END = re.compile(rb', "signature": "((?:[0-9a-f]{2}){1,80})"\}\Z')  # end of a signed list
_LONGEST_END = 200  # bytes


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
    found = bytes(rest[:_LONGEST_END])
    signature = found.removeprefix(_MAGIC)
    return signature if len(found) == len(rest) and found.startswith(_MAGIC) and is_signature(signature) else None


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
            "the update is not signed, but this object has a key: make the trainer's with sign= or CODEC_SIGN_KEY_FILE"
        )
    key.check(signature, _UPDATE, [data[: -len(_MAGIC + signature)]], "the update")


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
    end = _END.search(body[-_LONGEST_END:])
    signature = b"" if end is None else bytes.fromhex(end[1].decode())
    if end is None or not is_signature(signature):
        raise FrameError(
            "the list of updates is not signed, but this object has a key: make the Publisher with sign= or "
            "CODEC_SIGN_KEY_FILE, and with an empty folder"
        )
    key.check(signature, _LIST, [body[: -len(end[0])], b"}"], "the list of updates")
