"""Table of the keys that a parameter server holds, and the assignment of keys to servers."""

import threading
import zlib
from collections.abc import Sequence

import codec
from codec import ArgumentError, FrameError, StateError
from codec.torch.parameter_server.messages import INIT_NBYTES, INTERNAL, Key, label
from codec.torch.transport.messages import Array


def server_of(name: str, servers: Sequence[int]) -> int:
    """Return the server that holds a key: the one at index CRC-32(name) mod (number of servers)."""
    return servers[zlib.crc32(name.encode()) % len(servers)]


class Table:
    """Registered keys of a server, by number. Any thread may call all methods.

    Parameters
    ----------
    max_keys : int
        Maximum number of keys that the user may register. The same limit applies separately to the library's internal
        keys.
    max_key_nbytes : int
        Maximum size of a key's uncompressed tensor in bytes.
    """

    def __init__(self, max_keys: int, max_key_nbytes: int) -> None:
        self._max_keys, self._max_key_nbytes = max_keys, max_key_nbytes
        self._keys: list[Key] = []
        self._internal = 0  # number of internal keys of the library in `_keys`
        self._numbers: dict[str, int] = {}  # number of each key, by name
        self._limit = 0  # sum over all keys of the maximum bytes of a frame
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of the user's keys."""
        return len(self._keys) - self._internal

    def register(self, keys: Sequence[Key]) -> list[int]:
        """Register keys, and return their numbers. Registering a key again with the same shape returns its number.

        Raises
        ------
        ArgumentError
            A key has another dtype or shape than before, is too large, or there are too many keys. Then no key is
            registered.
        """
        with self._lock:
            for key in keys:
                known = self._keys[self._numbers[key.name]] if key.name in self._numbers else key
                if known != key:
                    raise ArgumentError(
                        f"{label(key.name)} was initialized as {known.dtype} of shape {known.shape}, not as "
                        f"{key.dtype} of shape {key.shape}"
                    )
                if key.nbytes > self._max_key_nbytes:
                    raise ArgumentError(
                        f"{label(key.name)} has {key.nbytes} bytes; the maximum of this server is "
                        f"{self._max_key_nbytes}"
                    )
            new = {key.name: key for key in keys if key.name not in self._numbers}
            internal = self._internal + sum(name.startswith(INTERNAL) for name in new)
            most = max(internal, len(self._keys) + len(new) - internal)
            if most > self._max_keys:
                raise ArgumentError(
                    f"there would be {most} keys; the maximum of this server is {self._max_keys}: create it with a "
                    "larger max_keys="
                )
            self._internal = internal
            for name, key in new.items():
                self._numbers[name] = len(self._keys)
                self._keys.append(key)
                self._limit += key.value_limit
            return [self._numbers[key.name] for key in keys]

    def key(self, number: int) -> Key:
        """Return the key with a number; raise StateError if there is none."""
        if number >= len(self._keys):
            raise StateError(f"key number {number} is not initialized: call init() first")
        return self._keys[number]

    def name(self, number: int) -> str:
        """Return the name of the key with a number, for error messages."""
        return label(self.key(number).name)

    def request_limit(self) -> int:
        """Return the maximum size of a valid request in bytes."""
        return max(INIT_NBYTES, 64 + 12 * len(self._keys) + self._limit)

    def check(self, number: int, frame: Array) -> None:
        """Raise an error unless `frame` is an undamaged frame with the dtype and shape of key `number`.

        Raises
        ------
        StateError
            There is no such key.
        ArgumentError
            The frame has another dtype or shape than the key.
        FrameError
            The bytes are no frame, are damaged, exceed the limit of the key, or need a codebook.
        """
        key = self.key(number)
        if frame.nbytes > key.value_limit:
            raise FrameError(
                f"the frame of {label(key.name)} has {frame.nbytes} bytes; the maximum is {key.value_limit}"
            )
        try:
            info = codec.inspect(frame)
            if (info.dtype, info.shape) != (key.dtype, key.shape):
                raise ArgumentError(
                    f"the frame of {label(key.name)} is {info.dtype} of shape {info.shape}; it was initialized as "
                    f"{key.dtype} of shape {key.shape}"
                )
            codec.verify(frame)
            if codec.inspect(frame).codebook_id is not None:
                raise FrameError(f"the frame of {label(key.name)} needs a codebook, which servers do not have")
        except FrameError as e:
            raise FrameError(f"{label(key.name)}: {e}") from e
