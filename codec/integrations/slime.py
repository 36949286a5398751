"""Hooks for slime's delta weight sync: send this library's updates to the engines instead of slime's XOR deltas.

Provisional: may change in any version.

``--custom-update-weight-post-write-path codec.integrations.slime.publish`` encodes each folder ``weight_v{N:06d}`` that
the trainer has written to ``--update-weight-disk-dir``, and adds it to the store that the environment variable
``CODEC_SLIME_STORE`` names. ``--sglang-custom-pull-weights-pre-read-hook codec.integrations.slime.fetch`` writes the
same folder on an engine's host, from the store. ``CODEC_SLIME_STORE`` is a folder or the URL of one in a
bucket, or on engines also the URL of :func:`codec.weight_sync.serve`. ``CODEC_SLIME_CHECKPOINT`` on engines is the
checkpoint of their ``--model-path``.

The disk dir is then local: all ranks of the trainer share it, but the engines' hosts do not. The trainer and each
engine host store a copy of the weights in their disk dir. The hooks need the package zstandard, and xxhash or blake3
if slime uses their checksums.
"""

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from codec.errors import ArgumentError, StateError
from codec.files.shards import weight_map
from codec.files.signing import SigningKey
from codec.integrations.slime_version import Version, write_version
from codec.tensors.view import TensorView
from codec.weight_sync.bases.folder import FolderBase
from codec.weight_sync.files import read_safetensors
from codec.weight_sync.http import environment
from codec.weight_sync.store.source import StoreReader
from codec.weight_sync.store.update_store import UpdateStore
from codec.weight_sync.updates.identity import RUN_NBYTES
from codec.weight_sync.updates.listing import Listed, chain
from codec.weight_sync.updates.shards import tensor_of
from codec.weight_sync.updates.update import Update
from codec.weight_sync.updates.weights import Weights
from codec.weight_sync.updates.writing import write_update

__all__ = ["fetch", "publish"]

_NAME = re.compile(r"weight_v\d{6,}", re.ASCII)
_trainers: dict[Path, FolderBase] = {}  # trainer's copy of the weights, by disk dir


def publish(args: Any, version_dir: str | PathLike[str], rollout_engines: Any) -> None:
    """Publish a version that slime has written. Trainer hook; ranks other than 0 return at once.

    Parameters
    ----------
    args : Namespace
        slime's arguments. Only ``hf_checkpoint`` is read: the checkpoint whose weights are version 0.
    version_dir : str or path
        Folder of the version. At the start of a run slime passes the disk dir itself; the store is then cleared.
    rollout_engines : object
        Not used.

    Raises
    ------
    StateError
        The version was published already, or its base is not the version that was published last.
    ArgumentError, FrameError
        The folder is incomplete or damaged. The store is unchanged.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_initialized() and distributed.get_rank() != 0:
        return
    folder, store = Path(version_dir), UpdateStore(_variable("CODEC_SLIME_STORE"), base=0)
    if not _NAME.fullmatch(folder.name):
        if (old := _trainers.pop(folder.resolve(), None)) is not None:
            old.close()
        shutil.rmtree(folder / "codec-trainer", ignore_errors=True)
        store.clear()
        _trainers[folder.resolve()] = _opened(folder / "codec-trainer", args.hf_checkpoint, os.urandom(RUN_NBYTES))
        return
    disk_dir = folder.parent.resolve()
    if disk_dir not in _trainers:
        _trainers[disk_dir] = _opened(disk_dir / "codec-trainer", args.hf_checkpoint, os.urandom(RUN_NBYTES))
    base, version = _trainers[disk_dir], Version(folder)
    _follow_store(base, store)
    if version.base != base.version:
        raise StateError(
            f"{folder} has base version {version.base}, but the last version of the trainer is {base.version}"
        )
    if unknown := sorted(version.changed - base.weights.keys()):
        raise ArgumentError(f"{folder} has a tensor that {args.hf_checkpoint} lacks: {unknown[0]!r}")
    file = store.path(version.number, base.version)
    pairs = _after(version, base.weights)
    numbers = version.number, base.weights, base.version
    update = write_update(pairs, *numbers, file=file, options=None, run=base.run, key=store.key)
    store.publish(update)
    base.apply(update)


def fetch(delta_dir: str | PathLike[str], target_version: int) -> None:
    """Write the folders of all new versions up to `target_version`. Engine hook; all ranks of a host may call it.

    Parameters
    ----------
    delta_dir : str or path
        slime's disk dir.
    target_version : int
        Version that the engine will read.

    Raises
    ------
    StateError
        The store does not have this version, or the engine's checkpoint differs from the trainer's.
    ArgumentError, FrameError
        The store cannot be read, or is damaged. No folder was written for the damaged version.
    """
    folder, store = Path(delta_dir), _variable("CODEC_SLIME_STORE")
    wanted = folder / f"weight_v{target_version:06d}"
    if wanted.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    key = environment.verify_key(None)
    with _locked(folder / "codec-engine.lock"), _engine(folder) as base, StoreReader(store, key=key) as source:
        assert base.version is not None  # a new folder has the weights of the checkpoint, version 0
        for one in chain(source.listing(), base.identity, newer=key is not None):
            if one.head.version > target_version:
                break
            update = _read(source, one, key)
            base.check_order(update)
            base.check(update)
            write_version(folder / f"weight_v{one.head.version:06d}", update, base)
            base.apply(update)
        if base.version < target_version:
            raise StateError(f"{wanted} cannot be written: the last version in the store {store} is {base.version}")
        if not wanted.exists():
            raise StateError(
                f"{wanted} was written before, but is missing: empty {folder} to begin again with version 0"
            )


def _follow_store(base: FolderBase, store: UpdateStore) -> None:
    """Apply updates to the trainer's copy that an earlier call has published, but could not apply."""
    base.settle()
    listing = store.listing()
    if listing.run == base.run:
        for one in chain(listing, base.identity):
            with StoreReader(store.source, key=store.key) as source:
                update = _read(source, one, store.key)
            base.check(update)
            base.apply(update)


def _read(source: StoreReader, one: Listed, key: SigningKey | None) -> Update:
    """Read an update, and check its signature if there is a key."""
    update = source.update(one)
    if key is not None:
        update.check_signature(key)
    return update


def _after(version: Version, weights: Weights) -> Iterator[tuple[str, TensorView]]:
    """Yield the tensors of `version`. Unchanged tensors are views of the base's memory."""
    for key, slot in weights.items():
        name = tensor_of(key)
        yield name, version.apply(name, slot).view if name in version.changed else slot.view


def _opened(folder: Path, checkpoint: str | PathLike[str], run: bytes | None = None) -> FolderBase:
    """Open the copy of the weights in a folder; fill an empty folder with the checkpoint, as version 0 of `run`."""
    base = FolderBase(folder)
    try:
        if base.version is None:
            base.fill(_checkpoint(Path(checkpoint)), 0, run)
    except BaseException:
        base.close()
        raise
    return base


def _checkpoint(folder: Path) -> Iterator[tuple[str, TensorView]]:
    """Yield the tensors that engines load from a checkpoint's folder, which may contain other copies of them.

    Engines load the tensors that the index names, from the files that it names; without an index, model.safetensors, or
    all files if there is none of that name.
    """
    if (index := folder / "model.safetensors.index.json").exists():
        places = weight_map(str(index))
        for shard in sorted(set(places.values())):
            found = read_safetensors(str(folder / shard))[0]
            for name in (name for name, place in places.items() if place == shard):
                if name not in found:
                    raise ArgumentError(f"{folder / shard} has no tensor {name!r}, which {index} assigns to this file")
                yield name, found[name].view
        return
    files = [path] if (path := folder / "model.safetensors").exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ArgumentError(f"{folder} has no .safetensors files: name the folder of a checkpoint")
    for path in files:
        for name, slot in read_safetensors(str(path))[0].items():
            yield tensor_of(name), slot.view


@contextmanager
def _engine(folder: Path) -> Generator[FolderBase]:
    base = _opened(folder / "codec-engine", _variable("CODEC_SLIME_CHECKPOINT"))
    try:
        yield base
    finally:
        base.close()


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold a file lock, so that only one process of this host fetches at a time."""
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _variable(name: str, environment: Mapping[str, str] = os.environ) -> str:
    if not environment.get(name):
        raise ArgumentError(
            f"the environment variable {name} is not set: see the documentation of codec.integrations.slime"
        )
    return environment[name]
