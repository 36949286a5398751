"""Updates of weights and LoRA adapters for TRL's ``AsyncGRPOTrainer``.

Provisional: may change in any version.

Start the vLLM server with ``--weight-transfer-config '{"backend": "codec"}'``. The trainer does not need vLLM.
``AsyncGRPOTrainer(weight_transfer=CodecWeightTransfer(...))`` sends updates instead of full weights; adapters of PEFT
are merged into them. To send only adapters, leave ``weight_transfer`` out, and replace ``trainer.vllm_client`` by a
:class:`CodecAdapterClient`.
"""

import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from codec.errors import ArgumentError
from codec.integrations.peft import AdapterPublisher
from codec.integrations.weights import send_adapters, synchronize
from codec.weight_sync import Publisher

__all__ = ["CodecAdapterClient", "CodecWeightTransfer"]


class CodecWeightTransfer:
    """Implementation of TRL's ``WeightTransferProtocol``. Only rank 0 of the trainer creates an instance.

    Parameters
    ----------
    client : VLLMClient
        TRL's client of the server: ``trl.experimental.async_grpo.vllm_client.VLLMClient(url)``.
    folder : str or path
        Folder for the updates, or URL of one in a bucket.
    host : str, optional
        Address of this machine on which to serve the folder over HTTP, if the vLLM server cannot read the folder from
        a shared disk.
    port : int
        Port on which to serve the folder; 0: any free port.
    base : str or path, optional
        Folder for the base, as in :class:`codec.WeightSender`. Default: the base is stored in memory.
    worker_folder : str, optional
        Folder in which the server's workers on each machine share a copy of the weights, on a disk of the
        machine. Default: each worker stores one in its memory.
    token, tls, sign : optional
        As in :class:`codec.weight_sync.Publisher`. The server's workers get theirs by environment variables.
    """

    def __init__(
        self,
        client: Any,
        folder: str | PathLike[str],
        *,
        host: str | None = None,
        port: int = 0,
        base: str | PathLike[str] | None = None,
        worker_folder: str | None = None,
        token: str | None = None,
        tls: Any = None,
        sign: Any = None,
    ) -> None:
        self._client, self._worker_folder = client, worker_folder
        self._publisher = Publisher(folder, host=host, port=port, base=base, token=token, tls=tls, sign=sign)

    def init_weight_transfer(self) -> None:
        """Wait for the server, and send the location of updates to its workers."""
        self._client.wait_for_server_ready()
        info = {"source": self._publisher.source, "folder": self._worker_folder}
        self._client.init_weight_transfer_engine(info)

    def pause(self) -> None:
        """Pause the server. Requests in flight are not aborted."""
        self._client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Send weights as an update: workers check it, then load it. If it fails, the server keeps its old weights."""
        synchronize(self._publisher, self._client, iterator)

    def resume(self) -> None:
        """Resume the server."""
        self._client.resume()

    def destroy(self) -> None:
        """Close the store of updates."""
        self._publisher.close()


class CodecAdapterClient:
    """TRL's client of a vLLM server that needs no disk which trainer and server share, to load LoRA adapters.

    TRL has no argument for the transfer of adapters. Once the trainer is created, on rank 0::

        client = CodecAdapterClient(trainer.vllm_client, "/data/updates", "/data/adapters", host="10.0.0.1")
        trainer.vllm_client = client

    The server needs ``--enable-lora``, and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``. If a step fails, it serves the
    adapters that it has.

    Parameters
    ----------
    client : VLLMClient
        TRL's client, whose other methods remain.
    folder : str or path
        Folder for the updates, or URL of one in a bucket.
    worker_folder : str
        Absolute path of a folder on the server's disks, for the adapters.
    host, port, token, tls, sign : optional
        As in :class:`CodecWeightTransfer`.
    """

    def __init__(
        self,
        client: Any,
        folder: str | PathLike[str],
        worker_folder: str,
        *,
        host: str | None = None,
        port: int = 0,
        token: str | None = None,
        tls: Any = None,
        sign: Any = None,
    ) -> None:
        self._worker_folder = Path(worker_folder)
        if not self._worker_folder.is_absolute():
            raise ArgumentError(f"worker_folder must be an absolute path, got {worker_folder!r}")
        self._client = client
        self._publisher = AdapterPublisher(folder, host=host, port=port, token=token, tls=tls, sign=sign)
        self._loaded: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def load_lora_adapter(self, lora_name: str, lora_path: str, timeout: int = 1800) -> None:
        """Send the adapter in a folder of the trainer to the server's disks, and make the server load it."""
        adapter = re.sub(r"-v\d+$", "", lora_name)
        keep = len(self._loaded) + 1  # vLLM may read the files of an adapter again, until after it was unloaded
        paths = send_adapters(self._publisher, self._client, {adapter: lora_path}, self._worker_folder, keep)
        self._client.load_lora_adapter(lora_name, paths[adapter], timeout)
        self._loaded.add(lora_name)

    def unload_lora_adapter(self, lora_name: str, timeout: int = 1800) -> None:
        """Remove an adapter. Its files are deleted when another one is loaded."""
        self._client.unload_lora_adapter(lora_name, timeout)
        self._loaded.discard(lora_name)

    def close(self) -> None:
        """Close the store of updates."""
        self._publisher.close()
