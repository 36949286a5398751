"""State of a client: registered keys, frames of tensors, and requests to the servers that hold the keys."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import codec
from codec import ArgumentError, FrameError, StateError
from codec.arguments import shown
from codec.torch.network.endpoint import Endpoint
from codec.torch.network.version import hash64
from codec.torch.parameter_server import messages, sums
from codec.torch.parameter_server.links import ServerLinks
from codec.torch.parameter_server.means import LOSSLESS, text_of
from codec.torch.parameter_server.messages import DTYPES, FLOATS, REDUCES, Key, Outgoing, Reduce
from codec.torch.parameter_server.table import server_of
from codec.torch.transport.messages import Array


class Session:
    """Registered keys of a client, and its connections to the servers. Only one thread may use it at a time.

    Parameters
    ----------
    endpoint : Endpoint
        Endpoint of this rank.
    servers : list of int
        Ranks of the servers.
    seconds : float
        Timeout, as for :class:`ServerLinks`.
    """

    def __init__(self, endpoint: Endpoint, servers: list[int], seconds: float) -> None:
        self.servers = servers
        self.keys: dict[str, tuple[Key, int]] = {}  # by name: registered key, and its number on its server
        self.devices: dict[str, torch.device] = {}  # by name: device of the tensor with which the key was registered
        self.links = ServerLinks(endpoint, servers, seconds)
        self._rank = endpoint.rank

    def register(self, keys: Sequence[Key]) -> None:
        """Register keys on their servers, and store the numbers that the servers return."""
        for batch in _batches(keys):
            groups: dict[int, list[Key]] = {}
            for key in batch:
                groups.setdefault(server_of(key.name, self.servers), []).append(key)
            requests = {s: messages.init_request(group) for s, group in groups.items()}
            (found,) = self.links.round([requests], 4 * len(batch), messages.read_ids)
            for s, numbers in found.items():
                self.keys |= {key.name: (key, n) for key, n in zip(groups[s], numbers, strict=True)}

    def known(self, name: str) -> tuple[Key, int]:
        """Return a registered key and its number; raise StateError if it is not registered."""
        if name not in self.keys:
            raise StateError(f"{shown(name)} is not initialized: call init() with its shape first")
        return self.keys[name]

    def tensor_of(self, name: str, value: Any) -> Any:
        """Convert None to zeros and a number to a tensor, with the dtype of the key; return other values unchanged."""
        key, _ = self.known(name)
        dtype: torch.dtype = getattr(torch, key.dtype)
        if value is None:
            return torch.zeros(key.shape, dtype=dtype, device="cpu")
        if not isinstance(value, int | float):
            return value
        if key.shape:
            raise ArgumentError(f"{name!r} must be a tensor of shape {key.shape}, got the number {value}")
        if not dtype.is_floating_point and not _holds(dtype, value):
            raise ArgumentError(f"{name!r} is {key.dtype}, which cannot hold {value}")
        return torch.tensor(value, dtype=dtype, device="cpu")

    def device_of(self, name: str, given: Any) -> torch.device:
        """Return the device for a key's mean: that of the gradient, or of the parameter if the gradient is None."""
        return given.device if isinstance(given, torch.Tensor) else self.devices.get(name, torch.device("cpu"))

    def check(self, name: str, tensor: Any) -> None:
        """Raise ArgumentError unless `tensor` is a dense tensor with the dtype and shape of the key `name`."""
        key, _ = self.known(name)
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ArgumentError(f"{name!r} must be a dense torch tensor, got {shown(tensor)}")
        if DTYPES.get(tensor.dtype) != key.dtype or tuple(tensor.shape) != key.shape:
            raise ArgumentError(
                f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; it was initialized as {key.dtype} of "
                f"shape {key.shape}"
            )

    def frame(self, step: int, name: str, value: Any, spec: codec.Spec) -> Any:
        """Encode a tensor, or return the buffer of a frame that the caller has encoded.

        A uint8 tensor for a key of floats is such a frame. Integers are always encoded lossless.
        """
        value = self.tensor_of(name, value)
        key, _ = self.known(name)
        if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and key.dtype in FLOATS:
            value = value.cpu().contiguous().numpy()
        if not isinstance(value, torch.Tensor):
            try:
                return memoryview(value).cast("B")
            except (TypeError, ValueError, BufferError):
                raise ArgumentError(f"{name!r} must be a tensor, number or frame, got {shown(value)}") from None
        self.check(name, value)
        how = spec if key.dtype in FLOATS else codec.Lossless()
        return codec.encode(value.detach().cpu(), how, stream=self.stream(step, name))

    def stream(self, step: int, name: str) -> int:
        """Return the number of the random stream for a tensor; it differs between workers, steps and keys."""
        return hash64("parameter server", step, self._rank, name) % (1 << 64)

    def decoded(
        self,
        values: Mapping[int, Sequence[Array]],
        names: Sequence[str],
        reduce: Reduce,
        scales: Mapping[str, float] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Decode the values in replies to a pull; return the tensors by key, in the order of `names`."""
        found: dict[str, torch.Tensor] = {}
        for server, group in self.by_server(names).items():
            for name, value in zip(group, values[server], strict=True):
                key, _ = self.keys[name]
                dtype: torch.dtype = getattr(torch, key.dtype)
                if reduce == "exact_mean":
                    scale = None if scales is None else scales[name]
                    found[name] = sums.exact_mean(value, key.shape, dtype, scale)
                    continue
                found[name] = torch.empty(key.shape, dtype=dtype, device="cpu")
                try:
                    codec.decode(value, out=found[name])
                except ArgumentError as e:
                    raise FrameError(f"server {server} has sent another tensor for {messages.label(name)}: {e}") from e
        return {name: found[name] for name in names}

    def by_server(self, names: Iterable[str]) -> dict[int, list[str]]:
        """Group key names by the server that holds the key."""
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(server_of(name, self.servers), []).append(name)
        return groups

    def push(self, step: int, frames: Mapping[str, Any]) -> dict[int, Outgoing]:
        """Encode the requests, by server, that push frames."""
        return {
            s: messages.request(messages.PUSH, step, [self.known(n)[1] for n in group], [frames[n] for n in group])
            for s, group in self.by_server(frames).items()
        }

    def pull(self, step: int, names: Sequence[str], reduce: Reduce, spec: codec.Spec = LOSSLESS) -> dict[int, Outgoing]:
        """Encode the requests, by server, that pull reductions."""
        how: Any = {"argument": REDUCES.index(reduce), "spec": text_of(spec)}
        return {
            s: messages.request(messages.PULL, step, [self.known(n)[1] for n in group], **how)
            for s, group in self.by_server(names).items()
        }

    def abandon(self, step: int, *, nonfinite: bool) -> None:
        """Notify all servers that this worker pushes no more keys in a step."""
        reason = messages.ABANDON_NONFINITE if nonfinite else messages.ABANDON_ERROR
        request = messages.request(messages.ABANDON, step, argument=reason)
        self.round(dict.fromkeys(self.links.alive(), request))

    def close(self) -> None:
        """Notify all servers that this worker is done."""
        self.round(dict.fromkeys(self.links.alive(), messages.request(messages.CLOSE)))

    def round(self, *requests: Mapping[int, Outgoing]) -> list[dict[int, list[Array]]]:
        """Send all requests, then receive the replies; return their values by server, or raise the first error."""
        limit = sum(key.value_limit + 64 for key, _ in self.keys.values())
        return self.links.round(requests, limit, messages.read_values)


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Return True if a value is an integer in the range of an integer dtype."""
    limits = torch.iinfo(dtype)
    return value == int(value) and limits.min <= value <= limits.max if math.isfinite(value) else False


def _batches(keys: Sequence[Key]) -> Iterable[list[Key]]:
    """Split keys into lists, each of which fits into one request."""
    batch: list[Key] = []
    nbytes = 0
    for key in keys:
        size = len(messages.key_record(key))
        if batch and nbytes + size > messages.INIT_NBYTES - 64:
            yield batch
            batch, nbytes = [], 0
        batch.append(key)
        nbytes += size
    if batch:
        yield batch
