"""Read and write version folders of slime's delta weight sync: .safetensors files of differences, and an index.

The index ``model.safetensors.index.json`` names the version, base version, encoding and checksum algorithm. For each
changed tensor, a .safetensors file contains a zstd frame of its difference, as uint8 values. With the encoding "xor",
the difference is the XOR of old and new bytes. With "overwrite", it is the number of changed bytes (4 bytes), their
positions (4 bytes each), then their new values. The metadata of the file contains the checksum of each tensor after
the update.
"""

import importlib
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from codec.errors import ArgumentError, ChecksumError, FrameError, UnsupportedError
from codec.files.header import MAX_JSON
from codec.weight_sync.bases.base import Base
from codec.weight_sync.files import read_safetensors
from codec.weight_sync.updates.kinds import Bytes
from codec.weight_sync.updates.mapping import mapped
from codec.weight_sync.updates.shards import tensor_of
from codec.weight_sync.updates.update import MAX_VERSION, Update
from codec.weight_sync.updates.weights import Slot

_INDEX = "model.safetensors.index.json"
_FILE = "model-00000-of-00001.safetensors"
_WINDOW = 1 << 27  # bytes: largest window that zstd's compression levels use


class Version:
    """Opened folder of one version, checked to be complete.

    Parameters
    ----------
    folder : path
        Folder of the version.

    Attributes
    ----------
    number, base : int
        Version, and the earlier version to which the differences refer.
    changed : set of str
        Names of the tensors that differ between the two versions.

    Raises
    ------
    ArgumentError
        A file is missing, or cannot be read.
    FrameError
        Index and files disagree, or do not have the format of a slime delta.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            text = mapped(folder / _INDEX)[: MAX_JSON + 1]
            index: Any = json.loads(text)
            meta, places = index["metadata"], index["weight_map"]
            self.number, self.base = int(meta["version"]), int(meta["base_version"])
            if not 0 <= self.base < self.number <= MAX_VERSION:
                raise ValueError(f"version {self.number} does not follow version {self.base}")
            self._encoding, self._checksum = meta["delta_encoding"], meta["checksum_format"]
            found = self._encoding, meta["compression_format"], self._checksum
            self._tensors = dict[str, tuple[Bytes, str]]()
            for file in sorted(set(places.values())):
                if Path(file).name != file:
                    raise ValueError(f"{file!r} is not the name of a file")
                slots, sums = read_safetensors(str(folder / file))
                named = {tensor_of(key): slot for key, slot in slots.items()}
                self._tensors |= {n: (slot.memory, sums[n]) for n, slot in named.items() if places.get(n) == file}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            raise FrameError(f"{folder} is not a delta of slime: {type(e).__name__}: {e}") from None
        if self._encoding not in ("xor", "overwrite") or found[1] != "zstd" or self._checksum not in _HASHES:
            raise UnsupportedError(f"the encoding, compression or checksum of {folder}, {found}, is unknown")
        if missing := sorted(places.keys() - self._tensors.keys()):
            raise FrameError(f"{folder} is incomplete: {places[missing[0]]} has no tensor {missing[0]!r}")
        self.changed = set(self._tensors)

    def apply(self, name: str, before: Slot) -> Slot:
        """Apply the difference of a tensor to `before`, verify the checksum, and return the new tensor.

        Raises
        ------
        FrameError
            The difference is damaged, or `before` is not the tensor to which it refers.
        """
        data, checksum = self._tensors[name]
        nbytes = before.kind.nbytes
        xor = self._encoding == "xor"
        diff = np.frombuffer(_decompressed(data, nbytes if xor else 4 + 5 * nbytes, name), np.uint8)
        if xor and len(diff) == nbytes:
            after = diff ^ before.memory
        else:
            after, n = before.memory.copy(), int.from_bytes(diff[:4].tobytes(), "little")
            positions = np.frombuffer(diff[4 : 4 + 4 * n].tobytes(), np.uint8)
            if xor or len(diff) != 4 + 5 * n or (at := positions.view("<u4")).max(initial=0) >= max(1, nbytes):
                raise FrameError(f"the difference of {name!r} in {self._folder} does not fit {before.kind}")
            after[at] = diff[4 + 4 * n :]
        if _HASHES[self._checksum](after) != checksum:
            raise ChecksumError(
                f"the checksum of {name!r} does not match after {self._folder} was applied: the folder is damaged, or "
                "the base differs"
            )
        return Slot(before.kind, after)


def write_version(folder: Path, update: Update, base: Base) -> None:
    """Write an update, which `base` has checked, as a version folder of slime, which appears once it is complete."""
    if folder.exists():
        return
    new = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    compress = _zstandard().ZstdCompressor(level=1).compress
    sums, entries, frames, end = dict[str, str](), dict[str, Any](), list[bytes](), 0
    for name in update.tensors:
        slot = base.weights[name]
        after = np.empty(slot.kind.nbytes, np.uint8)
        for k, (begin, stop) in enumerate(slot.kind.spans):
            base.decode(update, name, k, after[begin:stop])
        sums[name] = _adler32(after)
        frame: bytes = compress(np.bitwise_xor(after, slot.memory, out=after))
        entries[name] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": [end, end + len(frame)]}
        frames.append(frame)
        end += len(frame)
    if frames:
        header = json.dumps({"__metadata__": sums, **entries}).encode()
        header += b" " * (-len(header) % 8)
        with (new / _FILE).open("wb") as f:
            f.writelines([len(header).to_bytes(8, "little"), header, *frames])
    numbers = {"version": f"{update.version:06d}", "base_version": f"{update.base or 0:06d}"}
    how = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}
    (new / _INDEX).write_text(json.dumps({"metadata": numbers | how, "weight_map": dict.fromkeys(entries, _FILE)}))
    os.rename(new, folder)


def _decompressed(data: Bytes, most: int, name: str) -> bytes:
    zstandard = _zstandard()
    found = bytearray()
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(data.tobytes()) as reader:
            while chunk := reader.read(most + 1 - len(found)):
                found += chunk
    except zstandard.ZstdError as e:
        raise FrameError(f"the difference of {name!r} is damaged: {e}") from None
    return bytes(found)


def _adler32(data: Any) -> str:
    return f"{zlib.adler32(data):08x}"


def _xxh3(data: Any) -> str:
    return _package("xxhash").xxh3_128(data).hexdigest()


def _blake3(data: Any) -> str:
    return _package("blake3").blake3(data).hexdigest()


def _zstandard() -> Any:
    return _package("zstandard")


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ArgumentError(f"slime's deltas need the package {name}: pip install {name}") from None


_HASHES: dict[str, Callable[[Any], str]] = {
    "xxh3-128": _xxh3,
    "blake3": _blake3,
    "adler32": _adler32,
}
