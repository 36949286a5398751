"""Make a full checkpoint of one that stores changes."""

import os
import pickle
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from codec.checkpoints.chain import Checkpoint
from codec.checkpoints.index import METADATA, Item, write_index
from codec.checkpoints.streams import StreamWriter
from codec.errors import ArgumentError, FrameError
from codec.files.opening import printable
from codec.torch.saving.reader import key_of
from codec.torch.saving.stream import FULL

_CLASSES = {  # that the metadata of torch.distributed.checkpoint consists of
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"), ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"), ("pathlib", "Path"), ("torch.serialization", "_get_layout"),
}  # fmt: skip
_LARGEST_METADATA = 1 << 30  # bytes


class _Unpickler(pickle.Unpickler):
    """Unpickler of the classes of metadata only, which runs no code of a file."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of metadata, or a dtype."""
        import torch

        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise FrameError(f"the metadata of a checkpoint must not contain {module}.{name}")


def read_metadata(folder: Path) -> Any:
    """Read the metadata of a checkpoint.

    Raises
    ------
    FrameError
        The file is damaged, or contains objects of other classes than metadata.
    """
    path = folder / METADATA
    try:
        if path.stat().st_size > _LARGEST_METADATA:
            raise FrameError(f"{printable(str(path))} has more than {_LARGEST_METADATA} bytes")
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except OSError as e:
        raise ArgumentError(f"{printable(str(path))} cannot be read: {e.strerror or e}") from None
    except FrameError:
        raise
    except Exception as e:  # pickle raises nearly any exception for damaged files
        raise FrameError(f"{printable(str(path))} is damaged: {e}") from None
    if not isinstance(getattr(metadata, "storage_data", None), dict):
        raise FrameError(f"{printable(str(path))} is damaged: it does not say where the items are")
    return metadata


def compose_checkpoint(folder: str | os.PathLike[str], output: str | os.PathLike[str]) -> Checkpoint:
    """Write a full checkpoint with the items of a checkpoint of changes.

    The digest is that of the original, so that later checkpoints also find the new one as their base, if it lies beside
    them. The output appears once it is complete.

    Parameters
    ----------
    folder : path
        Folder of the checkpoint.
    output : path
        Folder to create.

    Returns
    -------
    Checkpoint
        The full checkpoint.

    Raises
    ------
    ArgumentError
        `output` exists, or cannot be written.
    CodecError
        The checkpoint or a base is damaged or missing.
    """
    checkpoint, target = Checkpoint(folder), Path(output)
    if target.exists() or target.is_symlink():
        raise ArgumentError(f"{printable(str(target))} exists already: name a new folder")
    metadata = read_metadata(checkpoint.folder)
    made = target.absolute().with_name(f".{target.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        made.mkdir()
        items = _write_items(checkpoint, made)
        for index, at in metadata.storage_data.items():
            item = items.get(key_of(index))
            if item is None:
                raise FrameError(f"the list of items of {printable(str(checkpoint.folder))} lacks {index.fqn!r}")
            metadata.storage_data[index] = replace(
                at, offset=item.begin, length=item.length, transform_descriptors=[FULL]
            )
        write_index(made, items.values(), None, 0, checkpoint.head.saved)
        with (made / METADATA).open("wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        made.rename(target)
    except OSError as e:
        raise ArgumentError(f"{printable(str(target))} cannot be written: {e.strerror or e}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return Checkpoint(target)


def _write_items(checkpoint: Checkpoint, folder: Path) -> dict[Any, Item]:
    """Write the items of a checkpoint in full to files of the same names."""
    items = dict[Any, Item]()
    by_file = dict[str, list[Item]]()
    for item in checkpoint.items.values():
        by_file.setdefault(item.file, []).append(item)
    for name, parts in by_file.items():
        with (folder / name).open("xb") as file:
            for item in parts:
                begin = file.tell()
                stream = StreamWriter(file)
                for chunk in checkpoint.chunks(item.key):
                    stream.write(chunk)
                stream.close()
                items[item.key] = replace(item, begin=begin, length=file.tell() - begin, changes=False)
            os.fsync(file.fileno())
    return items
