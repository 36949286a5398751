"""Storage reader of ``torch.distributed.checkpoint`` for checkpoints of frames, and for their chains of changes."""

from collections.abc import Sequence
from typing import IO, Any, cast

from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from codec.checkpoints.chain import Checkpoint, ItemChunks
from codec.checkpoints.index import Key
from codec.checkpoints.streams import StreamReader
from codec.errors import FrameError
from codec.torch.saving.stream import CHANGES, FrameStream


def key_of(index: MetadataIndex) -> Key:
    """Return the key of an item in the list of a checkpoint's items."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


class _Transforms:
    """Opens streams of items: those with changes itself, others as torch's reader does."""

    def __init__(self, reader: "CheckpointReader", others: Any) -> None:
        self._reader, self._others = reader, others

    def transform_load_stream(self, read_item: Any, transform_descriptors: Sequence[str], raw_stream: Any) -> Any:
        """Return a stream of the bytes of an item."""
        if CHANGES not in transform_descriptors:
            return self._others.transform_load_stream(read_item, transform_descriptors, raw_stream)
        checkpoint, key = self._reader.checkpoint(), key_of(read_item.storage_index)
        if len(transform_descriptors) != 1 or key not in checkpoint.items:
            raise FrameError(f"the item {key[0]!r} of {str(checkpoint.folder)!r} is not in its list of items")
        return cast(IO[bytes], StreamReader(ItemChunks(checkpoint, checkpoint.items[key], raw_stream)))


class CheckpointReader(FileSystemReader):
    """Reader of :func:`checkpoint_reader`."""

    def __init__(self, path: Any) -> None:
        registry = ExtensionRegistry()
        registry.register(FrameStream)
        super().__init__(path, _extension_registry=registry)  # pyright: ignore[reportUnknownMemberType]
        self.transforms: Any = _Transforms(self, self.transforms)
        self._checkpoint: Checkpoint | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Read another checkpoint from now on."""
        super().reset(checkpoint_id)  # pyright: ignore[reportUnknownMemberType]
        self._checkpoint = None

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint with its list of items."""
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(cast(Any, self).path)
        return self._checkpoint


def checkpoint_reader(path: Any) -> FileSystemReader:
    """Return a ``FileSystemReader`` for ``torch.distributed.checkpoint.load``.

    It reads checkpoints of :func:`checkpoint_writer`, and checkpoints without frames. A checkpoint of changes is read
    together with its bases, which are identified by their digests: a base is the folder of that name, or a folder
    beside the checkpoint.

    If a frame is damaged or incomplete, the error that ``load`` raises contains a :class:`codec.FrameError`. If a base
    is missing, it contains a :class:`codec.StateError` that names the folder.

    Parameters
    ----------
    path : str or path
        Directory of the checkpoint.
    """
    return CheckpointReader(path)
