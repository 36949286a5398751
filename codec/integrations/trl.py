"""Weight transfer for TRL's ``AsyncGRPOTrainer(weight_transfer=...)``: sends updates instead of full weights.

Provisional: may change in any version.

Start the vLLM server with ``--weight-transfer-config '{"backend": "codec"}'``. The trainer does not need vLLM.
"""

from collections.abc import Iterator
from os import PathLike
from typing import Any

from codec.integrations.weights import synchronize
from codec.weight_sync import Publisher

__all__ = ["CodecWeightTransfer"]


class CodecWeightTransfer:
    """Implementation of TRL's ``WeightTransferProtocol``. Only rank 0 of the trainer creates an instance.

    Parameters
    ----------
    client : VLLMClient
        TRL's client of the server: ``trl.experimental.async_grpo.vllm_client.VLLMClient(url)``.
    folder : str or path
        Folder for the updates.
    host : str, optional
        Address of this machine on which to serve the folder over HTTP, if the vLLM server cannot read the folder from
        a shared disk.
    port : int
        Port on which to serve the folder; 0: any free port.
    base : str or path, optional
        Folder for the base, as in :class:`codec.WeightSender`. Default: the base is stored in memory.
    worker_folder : str, optional
        Folder in which the server's workers store their weights. Default: they store them in memory.
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
