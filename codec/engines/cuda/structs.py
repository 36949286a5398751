"""Layouts of the structs that the host writes and kernels read, as ``native/cuda_api/src/layout.h`` declares them."""

import struct
from typing import Any

from codec._c.library import ffi

_LETTERS = {"uint32_t": "I", "uint64_t": "Q", "float": "f"}


def layout(name: str) -> struct.Struct:
    """Return the layout of a C struct. Fields of a struct inside of it are packed as separate values."""
    return struct.Struct("<" + _format(ffi.typeof(f"struct {name}")))


def _format(kind: Any) -> str:
    fields = [field.type for _, field in kind.fields]
    text = "".join([_format(field) if field.kind == "struct" else _LETTERS[field.cname] for field in fields])
    assert struct.calcsize("<" + text) == ffi.sizeof(kind), f"{kind.cname} has padding"
    return text


UNITS, ENCODING, DECODING, FOUND = layout("units"), layout("encoding"), layout("decoding"), layout("found")
PREPROCESSING, GROUP, WRITTEN = layout("preprocessing"), layout("group"), layout("written")
LISTS, PIECE = layout("lists"), layout("piece")
