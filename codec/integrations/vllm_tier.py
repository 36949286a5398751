# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Secondary tier for vLLM's KV cache: files of losslessly encoded chunks.

Provisional: may change in any version.

vLLM loads the tier by name, in the settings of the OffloadingConnector with ``"spec_name": "TieringOffloadingSpec"``::

    "secondary_tiers": [{"type": "CodecTier", "module_path": "codec.integrations.vllm_tier", "root_dir": "/cache"}]

vLLM's scheduler, which runs the tier, does not know the order of keys, values and heads in the bytes of a chunk. So
chunks cannot be quantized. Settings are those of vLLM's tier ``fs``, and ``head_size``, the number of channels per head
(default 128).
"""

import os
import uuid
from contextlib import suppress
from typing import Any

import numpy as np
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from codec._options import options
from codec.errors import CodecError
from codec.integrations.kv import page_codec
from codec.kv import PageCodec

__all__ = ["CodecTier"]

_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
_ONE_THREAD = options(threads=1)  # threads per chunk; vLLM's pool processes several chunks at a time


class CodecTier(FileSystemTierManager):
    """Tier ``fs`` whose files hold encoded chunks. A damaged file counts as a cache miss, and is removed.

    Only the transfers are overridden; file names, look-ups, threads and events are inherited from vLLM's tier.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        *,
        head_size: int = 128,
        n_read_threads: int = 4,
        n_write_threads: int = 4,
        **how: Any,
    ) -> None:
        folder = os.path.join(root_dir, "codec")  # a subfolder, since other tiers cannot read these files
        how |= {"n_read_threads": n_read_threads, "n_write_threads": n_write_threads}
        super().__init__(offloading_spec, primary_kv_view, tier_type, folder, **how)
        self._pages = chunk_codec(offloading_spec, self._block_size, head_size)

    def _values(self, chunk: int) -> Any:
        """Return a view of a chunk in the primary tier's memory, with the page shape of the codec."""
        start = int(chunk) * self._block_size
        row = np.frombuffer(self._primary_kv_view.cast("B")[start : start + self._pages.nbytes], np.uint8)
        return row.view(f"u{self._pages.nbytes // int(np.prod(self._pages.shape))}").reshape(self._pages.shape)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start a background job that encodes chunks into files. Files that exist are not written again."""
        keys = list(job_metadata.keys)
        paths = [self.file_mapper.get_file_name(key) for key in keys]

        def store() -> None:
            for path, chunk in zip(paths, job_metadata.chunk_ids, strict=True):
                if not os.path.exists(path):
                    write(path, self._pages.encode(self._values(chunk), options=_ONE_THREAD))

        if self.events is not None:
            self._store_job_keys[job_metadata.job_id] = keys
        self._job_block_counts[job_metadata.job_id] = len(keys)
        self._pool.enqueue_store(job_metadata.job_id, 1, [store])

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start a background job that decodes files into chunks. Chunks before the first failure count as loaded."""
        keys = list(job_metadata.keys)
        paths = [self.file_mapper.get_file_name(key) for key in keys]

        def load() -> None:
            for i, (path, chunk) in enumerate(zip(paths, job_metadata.chunk_ids, strict=True)):
                self._load_progress[job_metadata.job_id] = i
                with open(path, "rb") as file:
                    data = file.read()
                try:
                    self._pages.decode(data, out=self._values(chunk), options=_ONE_THREAD)
                except CodecError:
                    with suppress(OSError):
                        os.remove(path)
                    raise

        self._load_job_keys[job_metadata.job_id] = keys
        self._job_block_counts[job_metadata.job_id] = len(keys)
        self._pool.enqueue_load(job_metadata.job_id, 1, [load])


def chunk_codec(spec: Any, block_nbytes: int, head_size: int) -> PageCodec:
    """Return the codec of a chunk: one page layer for each model layer of each worker, without trailing padding."""
    layers = sum(len(group.layer_names) for group in spec.config.groups)
    copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    nbytes = min(spec.cpu_page_size_per_worker * copies, block_nbytes)
    dtype = spec.config.model.dtype if spec.config.model.dtype in _DTYPES else "uint8"
    values, rest = divmod(nbytes, _DTYPES.get(dtype, 1))
    if rest or values % (layers * copies * head_size):
        return page_codec((1, 1, 1, nbytes), "uint8", None, None, 64)
    return page_codec((layers * copies, 1, values // (layers * copies * head_size), head_size), dtype, None, None, 64)


def write(path: str, data: bytes) -> None:
    """Write a file atomically: write it under a temporary name, then rename it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise
