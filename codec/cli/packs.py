"""Packs of :func:`codec.encode_many`, for the commands ``ls``, ``inspect`` and ``verify``."""

import mmap
from collections import Counter
from typing import Any

from codec.advisor.advise import named
from codec.cli.console import STANDARD
from codec.errors import FrameError
from codec.files.opening import FileKind, kind_of, opened
from codec.inspection import verify
from codec.packs import Pack


def is_pack_file(path: str) -> bool:
    """Return True if a file, which is not standard input, begins as a pack does."""
    if path == STANDARD:
        return False
    with opened(path) as fd:
        return kind_of(fd) is FileKind.PACK


def _opened_pack(path: str) -> Pack:
    """Return the pack in a file, which is mapped to memory; raise FrameError if it is damaged."""
    with opened(path) as fd:
        return Pack(mmap.mmap(fd, 0, prot=mmap.PROT_READ))


def _named_pack(path: str) -> Pack:
    """Return the pack in a file; an error begins with the path."""
    try:
        return _opened_pack(path)
    except FrameError as e:
        e.of(path)
        raise


def pack_rows(path: str) -> list[dict[str, Any]]:
    """Return name, dtype, shape, size and frame of each tensor, for ``codec ls``."""
    pack = _named_pack(path)
    rows = list[dict[str, Any]]()
    for key, t in zip(pack.keys, pack.tensors, strict=True):
        info, shared = pack.infos[t.frame], len(pack.members[t.frame]) > 1
        nbytes = info.tensor_nbytes // max(1, info.n) * t.n
        stored = f"{named(info.spec)}, {'in frame' if shared else 'frame'} {t.frame}"
        row = {"name": str(key), "dtype": info.dtype, "shape": list(t.shape), "nbytes": nbytes}
        rows.append(row | {"ratio": info.ratio, "stored": stored})
    return rows


def pack_entries(path: str) -> dict[str, Any]:
    """Return the entries that ``codec inspect`` prints."""
    pack = _named_pack(path)
    return {
        "file": path, "kind": "a pack", "tensors": len(pack.tensors), "tensors_nbytes": pack.nbytes,
        "nbytes": pack.size, "ratio": pack.size / max(1, pack.nbytes), "frames": len(pack.infos),
        "specs": dict(Counter(named(pack.infos[t.frame].spec) for t in pack.tensors)),
        "dtypes": dict(Counter(pack.infos[t.frame].dtype for t in pack.tensors)),
    }  # fmt: skip


def verify_pack(path: str) -> str:
    """Verify all frames of a pack; return a line that describes the pack."""
    pack = _opened_pack(path)
    for frame in pack.frames:
        verify(frame)
    return f"a whole pack of {len(pack.tensors)} tensors"
