"""Model files for tests: tensors that use every coding of a container, and containers with a forged index."""

import json
import struct
import zlib

import numpy as np

from codec.files.header import compose
from codec.files.index import DIGEST_KEY, INDEX, VERSION_KEY, index_digest
from codec.files.opening import MemoryBytes
from codec.files.reading import open_bytes, read_header

CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "uint16": "U16", "uint8": "U8", "bool": "BOOL"}
CODES |= {"int64": "I64", "complex64": "C64"}


def tensors():
    """Return tensors by name, in unsorted order, each as (dtype name in .safetensors files, shape, bytes)."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((300, 128)).astype(np.float32)
    half = normal.astype(np.float16).astype(np.float32)
    mixed = np.concatenate([normal, np.zeros((900, 128), np.float32)])
    basis = np.cos(np.arange(257)[:, None] * np.arange(128) * (2 * np.pi / 256)).astype(np.float32)
    bits = (normal.view(np.uint32) >> 16).astype(np.uint16)
    found = {
        "weight": normal,
        "tied": normal,
        "bias": normal[0],
        "ones": np.ones(64, np.float32),
        "half": half,
        "brain": (bits.astype(np.uint32) << 16).view(np.float32),
        "mixed": mixed,
        "basis": basis,
        "scalar": np.float32(3).reshape(()),
        "empty": np.empty((0, 5), np.float32),
        "step": np.arange(3),
        "mask": rng.random(1000) < 0.5,
        "complex": np.ones(3, np.complex64),
        "double": rng.standard_normal(100),
    }
    given = {name: (CODES[x.dtype.name], x.shape, np.ascontiguousarray(x).tobytes()) for name, x in found.items()}
    given["bf16"] = ("BF16", bits.shape, bits.tobytes())
    given["fp4"] = ("F4", (6, 10), bytes(range(30)))
    return given


def safetensors(given=None, metadata=None):
    """Return the bytes of a .safetensors file whose header lists tensors in `given`'s order and has extra padding."""
    given = tensors() if given is None else given
    header = {} if metadata is None else {"__metadata__": metadata}
    places, at = {}, 0
    for name in sorted(given, reverse=True):  # the header lists tensors in another order than the data section
        places[name] = [at, at + len(given[name][2])]
        at = places[name][1]
    for name, (dtype, shape, _) in given.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": places[name]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + 16)
    return struct.pack("<Q", len(text)) + text + b"".join(given[name][2] for name in sorted(given, reverse=True))


def taken_apart(container):
    """Return the index of a container, parsed from JSON, and the bytes of its data section."""
    outer = read_header(MemoryBytes(container))
    entry = next(t for t in outer.tensors if t.name == INDEX)
    start = len(outer.prefix)
    return json.loads(zlib.decompress(container[start + entry.begin : start + entry.end])), container[
        start : start + entry.begin
    ]


def forged(index, data, version="1"):
    """Return a container with the given index, JSON or bytes, and valid digests."""
    packed = index if isinstance(index, bytes) else zlib.compress(json.dumps(index).encode())
    entries = [("codec.groups", "U8", (len(data),), len(data)), (INDEX, "U8", (len(packed),), len(packed))]
    return compose(entries, {VERSION_KEY: version, DIGEST_KEY: index_digest(packed)}).prefix + data + packed


def contents(container):
    """Return the bytes of the data section that a container restores."""
    model = open_bytes(container)
    out = np.zeros(model.header.data_nbytes, np.uint8)
    for k, t in enumerate(model.header.tensors):
        model.read(k, 0, out[t.begin : t.end])
    return model.header.prefix + out.tobytes()
