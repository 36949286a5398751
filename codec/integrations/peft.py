"""LoRA adapters that a trainer publishes, and that engines on other machines load. No shared disk is needed.

Provisional: may change in any version.

The trainer publishes folders that PEFT has saved, or configurations and tensors. A version has all adapters, and is
complete or not visible at all. Each receiver writes the same folders to a local disk, and makes its engine load them::

    model.save_pretrained("policy", save_embedding_layers=False)
    publisher.publish({"policy": "policy"})

PEFT is not imported.
"""

import http.client
import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from codec.arguments import whole
from codec.errors import ArgumentError, FrameError, StateError
from codec.integrations.adapter_folders import AdapterFolders
from codec.integrations.adapters import CONFIG, MAX_RANK, Adapter, adapter_weights, check_adapter, split
from codec.tensors.view import view
from codec.weight_sync import Publisher
from codec.weight_sync.closing import Closing
from codec.weight_sync.pulling import pull
from codec.weight_sync.receiver import WeightReceiver
from codec.weight_sync.updates.identity import Identity
from codec.weight_sync.updates.update import Update

__all__ = ["AdapterPublisher", "AdapterReceiver", "LoraServer"]

_SECONDS = 600.0  # time in which an engine must load an adapter


class LoraEngine(Protocol):
    """Methods by which an engine loads adapters: a LoraServer, an ``sglang.Engine``, or TRL's client of a server."""

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> Any:
        """Load the adapter in a folder under a name that requests can select."""
        ...

    def unload_lora_adapter(self, lora_name: str) -> Any:
        """Forget a name."""
        ...


class AdapterPublisher(Publisher):
    """Publisher of LoRA adapters, whose updates are snapshots where these are smaller.

    The arguments are those of :class:`codec.weight_sync.Publisher`. Receivers load the adapters under the names
    ``NAME-vVERSION``.

    Examples
    --------
    >>> from codec.integrations.peft import AdapterPublisher, AdapterReceiver
    >>> config = {"peft_type": "LORA", "r": 2, "target_modules": ["q"]}
    >>> lora = {f"base_model.model.q.lora_{k}.weight": np.ones((2, 2), np.float32) for k in "AB"}
    >>> publisher = AdapterPublisher(tempfile.mkdtemp(), host="127.0.0.1")
    >>> publisher.publish({"policy": (config, lora)})
    0
    >>> receiver = AdapterReceiver(tempfile.mkdtemp())
    >>> receiver.pull(publisher.source)
    0
    >>> [(name, sorted(os.listdir(path))) for name, path in receiver.paths.items()]
    [('policy-v0', ['adapter_config.json', 'adapter_model.safetensors'])]
    >>> publisher.close()
    """

    def stage(self, weights: Any, *, full: bool | None = None) -> Update:
        """Encode a version, and write the file of its update.

        Parameters
        ----------
        weights : mapping of str to path or (mapping, mapping)
            All adapters by name: for each the folder that PEFT has saved, or its configuration and its tensors. Engines
            unload an adapter that is missing, once they forget the versions before.
        full : bool or None
            As in :class:`codec.weight_sync.Publisher`.

        Raises
        ------
        ArgumentError
            An adapter cannot be read; is not one of LoRA; or has tensors that its configuration does not explain.
        """
        return super().stage(adapter_weights(weights), full=full)


class AdapterReceiver(Closing):
    """Receiver of LoRA adapters: writes each version in PEFT's format, and makes an engine load it.

    Each version has a new folder, and new names in the engine. An error leaves names and files of the former version
    unchanged: the engine serves :attr:`version`, and the next call tries again.

    Parameters
    ----------
    folder : str or path
        Folder on a disk that the engine reads, for the versions. Give each engine a folder of its own.
    engine : optional
        Engine that loads the adapters, such as a :class:`LoraServer`. Default: none; pass :attr:`paths` to it.
    keep : int
        Number of versions that stay loaded beside the newest one, for requests in flight.
    base_model : str, optional
        Name of the base model that all adapters must have in their configurations.
    max_rank : int
        Maximum rank of an adapter.
    max_nbytes, verify : optional
        As in :class:`codec.WeightReceiver`.

    Attributes
    ----------
    version : int or None
        Version that the engine serves; None before the first one.
    paths : dict of str to str
        Folder of each adapter, by the name under which the engine serves it: ``NAME-vVERSION``.
    keep : int
        As the argument; a new value counts from the next version on.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        engine: LoraEngine | None = None,
        *,
        keep: int = 2,
        base_model: str | None = None,
        max_rank: int = MAX_RANK,
        max_nbytes: int | None = None,
        verify: Any = None,
    ) -> None:
        self.keep = whole("keep", keep, 0)
        self._base_model, self._max_rank = base_model, whole("max_rank", max_rank, 1)
        self._receiver = WeightReceiver(max_nbytes=max_nbytes, verify=verify)
        self._folders, self._engine = AdapterFolders(folder), engine
        self._served: Identity | None = None
        self._turn = threading.RLock()
        self.paths: dict[str, str] = {}

    @property
    def folder(self) -> Path:
        """Absolute path of the folder of the versions."""
        return self._folders.root

    @property
    def version(self) -> int | None:
        """Version that the engine serves; None before the first one."""
        return None if self._served is None else self._served.version

    def pull(self, source: str | os.PathLike[str], **how: Any) -> int | None:
        """Bring the engine to the last version in a store, and return the version.

        Parameters
        ----------
        source : str or path
            ``source`` of an :class:`AdapterPublisher`.
        **how
            ``timeout``, ``token`` and ``cafile``, as in :func:`codec.weight_sync.pull`.

        Raises
        ------
        StateError, ArgumentError, FrameError, LimitError
            As in :func:`codec.weight_sync.pull`.
        FrameError
            An adapter is not one of LoRA, imports code, has another base model or a higher rank than this receiver
            allows, or has tensors that its configuration does not explain.
        StateError
            The folder cannot be written, or the engine cannot be reached or has rejected an adapter.
        """
        with self._turn:
            pull(self._receiver, source, **how)
            return self._serve()

    def apply(self, update: Any, *, restart: bool = False) -> int | None:
        """Bring the engine to the version of an update, as :meth:`pull`.

        Parameters
        ----------
        update, restart : optional
            As in :meth:`codec.WeightReceiver.apply`.
        """
        parsed = update if isinstance(update, Update) else Update(update)
        with self._turn:
            identity = self._receiver.identity
            if identity == self._served or not parsed.head.after.matches(identity):  # otherwise the engine has failed
                self._receiver.apply(parsed, restart=restart)
            return self._serve()

    def reload(self) -> None:
        """Make the engine load the last version again, such as after it was restarted."""
        with self._turn:
            self._served = None
            self._serve()

    def _serve(self) -> int | None:
        identity = self._receiver.identity
        if identity is None or identity == self._served:
            return self.version
        adapters = self._adapters()
        path = self._folders.write(identity, adapters)
        folders = {f"{name}-v{identity.version}": str(path / name) for name in sorted(adapters)}
        tried = list[str]()
        try:
            for name, folder in folders.items():
                tried.append(name)
                self._load(name, folder)
        except BaseException:
            self._undo(tried)
            if str(path) not in map(os.path.dirname, self.paths.values()):
                self._folders.remove(path)
            raise
        self._served, self.paths = identity, folders
        with suppress(OSError):  # the next version tries again
            self._forget_old(path)
        return self.version

    def _adapters(self) -> dict[str, Adapter]:
        """Return the adapters of the last version that was received."""
        receiver, adapters = self._receiver, dict[str, Adapter]()
        kinds = receiver.kinds
        try:
            for name, tensors in split(kinds).items():
                [(_, config)] = receiver.tensors([tensors.pop(CONFIG)])
                found = {n: kinds[full] for n, full in tensors.items()}
                check_adapter(name, config.tobytes(), found, self._base_model, self._max_rank)
                read = dict(receiver.tensors(tensors.values(), like=np.empty(0, np.uint16)))  # bfloat16 as bits
                views = {n: view(read[full])._replace(dtype=kinds[full].dtype) for n, full in tensors.items()}
                adapters[name] = Adapter(config.tobytes(), views)
        except ValueError as e:
            raise FrameError(f"version {receiver.version} of the adapters is not loaded: {e}") from None
        return adapters

    def _load(self, name: str, folder: str) -> None:
        if self._engine is None:
            return
        try:
            _checked(self._engine.load_lora_adapter(name, folder))
        except Exception:  # the name is known, from a process before this one or of another run
            with suppress(Exception):
                self._engine.unload_lora_adapter(name)
            _checked(self._engine.load_lora_adapter(name, folder))

    def _undo(self, names: list[str]) -> None:
        """Unload names of a version that failed; load those again that the version before has, too."""
        for name in names:
            if self._engine is not None:
                with suppress(Exception):
                    self._engine.unload_lora_adapter(name)
            if (folder := self.paths.get(name)) is not None:
                try:
                    self._load(name, folder)
                except Exception:
                    self._served = None
                    del self.paths[name]

    def _forget_old(self, current: Path) -> None:
        """Unload and delete versions before the last ones."""
        versions = self._folders.versions()
        others = [one for one in versions if one[0] != current]
        old = others[: max(0, len(others) - self.keep)]
        kept = {f"{name}-v{v}" for path, v, names in versions for name in names if (path, v, names) not in old}
        for path, version, names in old:
            for name in names:
                if self._engine is not None and f"{name}-v{version}" not in kept:
                    with suppress(Exception):
                        self._engine.unload_lora_adapter(f"{name}-v{version}")
            self._folders.remove(path)

    def close(self) -> None:
        """Release the adapters in memory. The engine keeps serving them from its files."""
        self._receiver.close()


def _checked(result: Any) -> None:
    """Raise StateError if an engine has returned an error; SGLang's engine raises none."""
    if getattr(result, "success", True) is False:
        raise StateError(f"the engine has rejected the adapter: {getattr(result, 'error_message', '')!s:.500}")


class LoraServer:
    """Server of vLLM or SGLang that loads adapters from its disk.

    Parameters
    ----------
    url : str
        URL of the server, of vLLM with ``/v1``: ``http://127.0.0.1:8000/v1``. It must run on the receiver's machine, or
        share its disk. Start vLLM with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` and ``--enable-lora``, SGLang with
        ``--enable-lora``.
    api_key : str, optional
        Key that the server requires.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError(f"url must be one of http or https, got {url!r:.200}")
        self._url, self._parts = url.rstrip("/"), parts
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        """Load an adapter.

        Raises
        ------
        StateError
            The server cannot be reached, or has rejected the adapter.
        """
        self._post("load_lora_adapter", {"lora_name": lora_name, "lora_path": lora_path})

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Forget a name.

        Raises
        ------
        StateError
            The server cannot be reached, or does not know the name.
        """
        self._post("unload_lora_adapter", {"lora_name": lora_name})

    def _post(self, call: str, body: dict[str, str]) -> None:
        kind = http.client.HTTPConnection if self._parts.scheme == "http" else http.client.HTTPSConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_SECONDS)
        path = f"{self._parts.path.rstrip('/')}/{call}"
        try:
            connection.request("POST", path, json.dumps(body), self._headers)
            reply = connection.getresponse()
            text = reply.read(1 << 16).decode(errors="replace")
        except (OSError, http.client.HTTPException) as e:
            raise StateError(f"{self._url} cannot be reached: {e}") from None
        finally:
            connection.close()
        if reply.status != 200:
            unknown = reply.status == 404 and "Not Found" in text
            hint = ": start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" if unknown else ""
            raise StateError(f"{self._url}/{call} has answered {reply.status}: {text:.500}{hint}")
