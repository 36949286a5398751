"""Compare packed model files with other compressors: sizes of whole files, and speeds of one thread.

    python bench/files/convert.py wheels models    # or any folder of .safetensors files
    python bench/files/sizes.py models

Sizes are those of whole files, headers included, as fractions of the .safetensors file's size. zstd -19 and ZipNN
compress the file as bytes; ZipNN is configured for the most frequent dtype of the file. Speeds are in GB/s of the
.safetensors file, by CPU time of one thread, in memory, best of three. Reading copies the file from the page cache to
memory.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from codec.cli.compressors import best, lmzip, zipnn, zstd
from codec.files.opening import MemoryBytes
from codec.files.packing import pack
from codec.files.reading import open_bytes, read_header
from codec.files.restoring import read_all
from codec.files.sources import MemorySource

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
cpu = partial(best, seconds=0, times=3, clock=time.process_time)  # least CPU time of three calls, and the result


class Memory:
    """File in preallocated memory, so that the time of growing a buffer is not measured."""

    def __init__(self, room: np.ndarray) -> None:
        self._room, self._at, self.nbytes = room, 0, 0

    def seek(self, at: int) -> None:
        self._at = at

    def write(self, data: Any) -> None:
        values = np.frombuffer(data, np.uint8)
        self._room[self._at : self._at + len(values)] = values
        self._at += len(values)
        self.nbytes = max(self.nbytes, self._at)


def packed(data: bytes) -> dict[str, float]:
    """Return the size of a packed file, and the speeds of packing and unpacking in memory."""
    header = read_header(MemoryBytes(data))
    begin, values = len(header.prefix), np.frombuffer(data, np.uint8)
    tensors = [(t.name, t.dtype, t.shape, values[begin + t.begin : begin + t.end]) for t in header.tensors]
    source = MemorySource(tensors)

    room = np.zeros(len(data) + (1 << 20), np.uint8)

    def compress() -> Memory:
        file = Memory(room)
        pack(source, file, threads=1)
        return file

    rooms = {t.name: np.zeros(t.nbytes, np.uint8) for t in header.tensors}
    seconds, file = cpu(compress)
    model = open_bytes(room[: file.nbytes])
    back, _ = cpu(lambda: read_all(model, lambda t: (None, rooms[t.name]), 1))
    assert all(np.array_equal(rooms[name], x) for name, *_, x in tensors)
    size = len(data)
    return {"codec": file.nbytes / size, "pack": size / seconds / 1e9, "unpack": size / back / 1e9}


def others(path: Path, data: bytes) -> Iterator[tuple[str, float]]:
    """Yield the name of each other compressor, and the size of its output relative to the file's size."""
    values = np.frombuffer(data, np.uint8)
    yield "zstd -19", len(zstd(19).compress(values, "uint8")) / len(data)
    header = read_header(MemoryBytes(data))
    counts = Counter[str]()
    for t in header.tensors:
        counts[t.dtype] += t.nbytes
    yield "zipnn", len(zipnn().compress(values, DTYPES.get(counts.most_common(1)[0][0], "float32"))) / len(data)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "model.lmz"
        if calls := lmzip(str(path), str(archive), ""):
            calls[0]()
            yield "lmzip", archive.stat().st_size / len(data)


def main() -> None:
    """Print a table with a row for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders, or .safetensors files")
    parser.add_argument("--alone", action="store_true", help="leave out other compressors")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    args = parser.parse_args()
    rows = []
    print(
        "| file | MB | codec | zstd -19 | zipnn | lmzip | pack | unpack | read |\n|---|---|---|---|---|---|---|---|---|"
    )
    for path in (
        p for given in args.models for p in ([given] if given.is_file() else sorted(given.glob("*.safetensors")))
    ):
        read, data = cpu(path.read_bytes)
        row = {"nbytes": len(data), "read": len(data) / read / 1e9} | packed(data)
        row |= {} if args.alone else dict(others(path, data))
        rows.append({"file": path.name} | row)
        sizes = [f"{100 * row[k]:.1f}%" if k in row else "" for k in ("codec", "zstd -19", "zipnn", "lmzip")]
        speeds = [f"{row[k]:.2g}" for k in ("pack", "unpack", "read")]
        print("|", " | ".join([path.stem, f"{len(data) / 1e6:.1f}", *sizes, *speeds]), "|", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
