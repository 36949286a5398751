"""Send activations between pipeline stages as deltas from the activations of the sample's last visit (AQ-SGD).

One file: it is one class.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from codec._options import CallOptions, settings_of
from codec.arguments import whole
from codec.encoding import bound
from codec.errors import PeerError, StateError
from codec.specs import Preset, Quantize, Spec
from codec.stateful.activation import state
from codec.stateful.activation.change import ActivationStats, Change
from codec.stateful.activation.entries import EIGHT_BIT
from codec.stateful.activation.ledger import Ledger, Staging
from codec.stateful.activation.message import HEAD, ROW, ContentKind, Message, parse
from codec.stateful.activation.receiver import Receiver, Target
from codec.stateful.activation.sender import LOSSLESS, Sender
from codec.stateful.activation.settings import delta_spec_of, entries_of, spec_of, store_of
from codec.stateful.activation.store_info import inspect_store
from codec.stateful.activation.traffic import ActivationTraffic
from codec.stateful.activation.values import ids_of, shown_samples, values_of, write_message
from codec.tensors.view import TensorView, fetch, mark_written, view_bytes

EntryDtype = Literal["float32", "bfloat16", "8bit"]

_FORWARD = Quantize(4, rounding="nearest")
_BACKWARD = Quantize(8)


class ActivationDelta:
    """One side of an edge between pipeline stages, which sends activations as deltas (AQ-SGD).

    Provisional: may change in any version.

    For each sample, both sides store m: the activations that the receiver decoded when the sample was last sent. An
    unseen sample is sent raw, that is, without a difference, in 8 bits per value by default; m is then the decoded
    activations. A seen sample with activations a is sent as a delta Q(a - m). Both sides set m := m + Q(a - m), rounded
    to float32, and the receiver continues with the new m. The two copies of m are bit-identical. Gradients are
    quantized without a difference. As training converges, a - m becomes small, and so does its quantization error.

    In a step, call :meth:`encode` or :meth:`decode` for each micro-batch, then :meth:`commit` or :meth:`rollback`, at
    the same points on both sides. Before the commit, m does not change. If a sample occurs several times in a step, m
    is updated once, by the first occurrence.

    Each delta contains a check of the m to which it refers: a hash of all frames since m was sent raw. A receiver that
    has another m, because it was restarted or a message was lost, raises StateError and does not change its state. To
    recover, both sides call :meth:`rollback`, and the sender calls :meth:`forget` for these samples, so that they are
    sent raw.

    An object must not be used by several threads at the same time.

    Parameters
    ----------
    spec : Spec or str
        Codec for deltas, or the name of a preset. It must be lossy and refuse NaN and Inf. Prefer rounding to nearest:
        its error is smaller, and the error of a delta is part of the next delta.
    backward : Spec or str
        Codec with which :meth:`encode_gradient` encodes; ``Quantize(8)`` by default.
    first : Spec or str
        Codec for samples that are sent raw; ``Quantize(8, rounding="nearest")`` by default. :class:`Lossless` sends 4
        times as many bytes at the first visit of each sample. Samples with NaN or Inf are always sent losslessly.
    store : {"ram"} or path
        Where m is stored: "ram", or the path of a folder for files, which is created if it does not exist. Each side
        needs a separate folder. Files survive the process; a new object with the same folder continues with them. A
        thread writes the files. If a file is damaged or cannot be written, its samples are sent raw.
    budget : int, optional
        Maximum size of all stored m in bytes. Samples that do not fit have no m and are always sent raw; they are the
        same samples on both sides. Both sides need the same budget. Default: no limit.
    dtype : {"float32", "bfloat16", "8bit"}
        Dtype in which m is stored: 4 bytes, 2 bytes, or 1.06 bytes per value (``Quantize(8, rounding="nearest")``).
        Both sides need the same dtype. :meth:`decode` returns activations before this rounding.
    edge : int
        Number of the edge, 0 to 2^64 - 1; it must be equal on both sides. Messages of other edges are refused.

    Raises
    ------
    ArgumentError, SpecError
        An argument has an invalid type or value.

    References
    ----------
    .. [1] J. Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Quantization with
       Guarantees", NeurIPS 2022.

    Examples
    --------
    >>> sender, receiver = codec.ActivationDelta(), codec.ActivationDelta()
    >>> a = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    >>> for epoch in range(3):
    ...     message = sender.encode(a, samples=[7, 11, 13, 17])
    ...     received = receiver.decode(message, [7, 11, 13, 17])
    ...     sender.commit()
    ...     receiver.commit()
    ...     a += 0.01  # the weights have changed
    >>> len(message) < a.nbytes / 6, float(np.abs(received - a).max()) < 0.02
    (True, True)

    A side that lost its state refuses the delta. After ``forget``, samples are sent raw.

    >>> receiver = codec.ActivationDelta()
    >>> receiver.decode(sender.encode(a, [7, 11, 13, 17]))
    Traceback (most recent call last):
    codec.errors.StateError: this side lacks, or has with other values, the stored activations m of samples 7, ...
    >>> sender.rollback()
    >>> sender.forget([7, 11, 13, 17])
    >>> received = receiver.decode(sender.encode(a, [7, 11, 13, 17]))
    >>> bool(np.abs(received - a).max() < 0.02)
    True
    """

    inspect_store = staticmethod(inspect_store)

    def __init__(
        self,
        spec: Spec | Preset = _FORWARD,
        *,
        backward: Spec | str = _BACKWARD,
        first: Spec | str = EIGHT_BIT,
        store: Any = "ram",
        budget: int | None = None,
        dtype: EntryDtype = "float32",
        edge: int = 0,
    ) -> None:
        self.spec = spec
        self.backward = backward
        entries = entries_of(dtype)
        limit = None if budget is None else whole("budget", budget, 0)
        number = whole("edge", edge, 0, (1 << 64) - 1)
        self._change = Change()
        opened = store_of(store, entries, number)
        self._ledger = Ledger(opened, entries, limit, opened.found)
        self._sender = Sender(self._ledger, self._change, spec_of("first", first))
        self._receiver = Receiver(self._ledger)
        self._traffic = ActivationTraffic(number, entries)
        self._committed_draws = 0

    @property
    def spec(self) -> Spec:
        """Codec for deltas. It may be changed between messages, since each frame contains its spec.

        Assigning a spec that cannot encode deltas raises SpecError.
        """
        return self._spec

    @spec.setter
    def spec(self, spec: Spec | Preset) -> None:
        self._spec = delta_spec_of(spec)

    @property
    def backward(self) -> Spec:
        """Codec for gradients. It may be changed between messages, since each frame contains its spec."""
        return self._backward

    @backward.setter
    def backward(self, spec: Spec | str) -> None:
        self._backward = spec_of("backward", spec)

    @property
    def first(self) -> Spec:
        """Codec for samples sent raw. It may be changed between messages, since each frame contains its spec."""
        return self._sender.first

    @first.setter
    def first(self, spec: Spec | str) -> None:
        self._sender.first = spec_of("first", spec)

    def encode(
        self, activation: Any, samples: Iterable[int] | None, *, out: Any = None, options: CallOptions | None = None
    ) -> bytes | memoryview:
        """Encode the activations of a micro-batch, and stage the new m for :meth:`commit`.

        Samples with NaN or Inf are sent raw and losslessly.

        Parameters
        ----------
        activation : array, tensor or View
            float32, bfloat16 or float16 values in host memory. The first dimension counts samples.
        samples : iterable of int, or None
            Id of each sample, int64. None: m is neither used nor changed, as for evaluation.
        out : writable buffer, optional
            Buffer for the message; :meth:`bound` bytes are always enough.
        options : CallOptions, optional
            As in :func:`codec.encode`.

        Returns
        -------
        bytes, or memoryview of `out`
            The message. The memoryview is read-only, and valid until `out` is written again.

        Raises
        ------
        ArgumentError, SpecError, EngineError
            As in :func:`codec.encode`; or the number of ids is not the first dimension of `activation`; or `budget` is
            too small for a single sample. The state is unchanged.
        """
        settings_of(options)
        x = values_of("the activation", activation)
        head = self._traffic.next_head(x.dtype)
        if samples is None:
            return self._sent(self._sender.direct(head, x, options), out)
        ids = ids_of(samples)
        message, staging = self._sender.activation(head, x, ids, self._spec, options)
        return self._sent(message, out, staging)

    def decode(
        self,
        message: Any,
        samples: Iterable[int] | None = None,
        *,
        out: Any = None,
        like: Any = None,
        options: CallOptions | None = None,
    ) -> Any:
        """Decode the activations of a micro-batch, and stage the new m for :meth:`commit`.

        Parameters
        ----------
        message : bytes or buffer
            Whole message from the other side, without trailing bytes.
        samples : iterable of int, optional
            Ids of the samples that this side expects, in order. Default: accept the ids in the message.
        out, like, options
            As in :func:`codec.decode`. `out` is unchanged after an error.

        Returns
        -------
        numpy.ndarray, or `out`, or a tensor of the kind of `like`
            Activations, in the dtype that was encoded.

        Raises
        ------
        FrameError
            The bytes are not a message, or are damaged.
        StateError
            The message refers to an m that this side does not have; was decoded before or arrives out of order; or has
            another edge, another dtype of m or other samples. ``item`` is a tuple of the samples whose m is missing or
            different.
        ArgumentError, EngineError
            As in :func:`codec.decode`. The state is unchanged after any error.
        """
        m, v = self._received(message, options)
        if m.head.kind in (ContentKind.GRADIENT, ContentKind.POISON):
            raise StateError(f"message {m.head.number} of edge {m.head.edge} holds a gradient: use decode_gradient()")
        if samples is not None and (expected := ids_of(samples)) != m.samples.tolist():
            raise StateError(
                f"message {m.head.number} of edge {m.head.edge} has samples {shown_samples(m.samples.tolist())}, but "
                f"samples= expects {shown_samples(expected)}"
            )
        of_kind = self._receiver.plain if m.head.kind == ContentKind.DIRECT else self._receiver.activation
        result = of_kind(m, v.nbytes, Target(out, like), options)
        deltas = int(np.count_nonzero(m.checks))
        self._accept(m, v.nbytes, out, len(m.checks) - deltas, deltas)
        return result

    def encode_gradient(
        self, gradient: Any, *, out: Any = None, options: CallOptions | None = None
    ) -> bytes | memoryview:
        """Encode the gradient of activations with the codec `backward`, without state.

        If the gradient contains NaN or Inf, which the codec refuses, the message contains no values, and
        :meth:`decode_gradient` raises PeerError. So the other side does not wait for a message that never arrives.

        Parameters
        ----------
        gradient : array, tensor or View
            float32, bfloat16 or float16 values in host memory.
        out, options
            As in :meth:`encode`.

        Returns
        -------
        bytes, or memoryview of `out`
            The message.

        Raises
        ------
        ArgumentError, EngineError
            As in :meth:`encode`.
        """
        settings_of(options)
        x = values_of("the gradient", gradient)
        head = self._traffic.next_head(x.dtype)
        return self._sent(self._sender.gradient(head, x, self._backward, options), out)

    def decode_gradient(
        self, message: Any, *, out: Any = None, like: Any = None, options: CallOptions | None = None
    ) -> Any:
        """Decode a message of :meth:`encode_gradient`.

        Parameters
        ----------
        message, out, like, options
            As in :meth:`decode`.

        Returns
        -------
        numpy.ndarray, or `out`, or a tensor of the kind of `like`
            The gradient.

        Raises
        ------
        PeerError
            The gradient on the other side contains NaN or Inf.
        FrameError, StateError, ArgumentError, EngineError
            As in :meth:`decode`.
        """
        m, v = self._received(message, options)
        if m.head.kind not in (ContentKind.GRADIENT, ContentKind.POISON):
            raise StateError(f"message {m.head.number} of edge {m.head.edge} holds activations: use decode()")
        if m.head.kind == ContentKind.POISON:
            self._accept(m, v.nbytes, None)
            raise PeerError(f"the gradient of edge {m.head.edge} holds NaN or Inf on the side that computed it")
        result = self._receiver.plain(m, v.nbytes, Target(out, like), options)
        self._accept(m, v.nbytes, out)
        return result

    def bound(self, shape: Iterable[int], dtype: Any = "float32") -> int:
        """Return an upper bound of the size of a message with activations or a gradient of a given shape.

        Parameters
        ----------
        shape : iterable of int
            Shape of the activations of a micro-batch; the first dimension counts samples.
        dtype : str, type or dtype
            Dtype of the activations.

        Returns
        -------
        int
            Size in bytes.
        """
        sizes = tuple(shape)
        specs = (LOSSLESS, self._sender.first, self._backward)
        largest = max(bound(sizes, dtype, spec) for spec in specs)
        return HEAD.size + ROW * (sizes[0] if sizes else 0) + largest + bound(sizes, "float32", self._spec)

    def commit(self) -> None:
        """Apply the updates of m of all messages since the last commit or rollback."""
        self._ledger.commit()
        self._committed_draws = self._sender.draws

    def rollback(self) -> None:
        """Drop the updates of m of all messages since the last commit; m is then bit-identical to the last commit.

        Messages of a repeated step are rounded with the same random bits.
        """
        self._ledger.rollback()
        self._sender.draws = self._committed_draws

    def forget(self, samples: Iterable[int] | None = None) -> None:
        """Remove m of samples, including uncommitted updates. The next time, these samples are sent raw.

        Parameters
        ----------
        samples : iterable of int, optional
            Sample ids; unknown ones are ignored. Default: all samples.
        """
        self._ledger.forget(ids_of(samples) if samples is not None else self._ledger.everything())

    def prefetch(self, samples: Iterable[int]) -> None:
        """Start to read the m of samples from files, for later calls of :meth:`encode` or :meth:`decode`.

        A thread reads up to 256 MiB; the call does not wait for it. Samples without m, or with m in memory, are
        ignored.

        Parameters
        ----------
        samples : iterable of int
            Sample ids, such as those of the next step.
        """
        self._ledger.store.prefetch(ids_of(samples))

    def flush(self) -> None:
        """Wait until all committed m are on the disk. With ``store="ram"`` this is a no-op.

        Raises
        ------
        StateError
            A file cannot be written to the disk.
        """
        try:
            self._ledger.store.flush()
        except OSError as e:
            raise StateError(f"the files of the store cannot be written: {e}") from e

    def close(self) -> None:
        """Write all committed m to the files, and close the files. The object must not be used afterwards.

        If this is not called, the files are completed when the object is garbage-collected or the interpreter exits
        normally.
        """
        self._ledger.store.close()

    def known(self, samples: Iterable[int]) -> Any:
        """Return a mask of the samples that have a committed m.

        Parameters
        ----------
        samples : iterable of int
            Sample ids.

        Returns
        -------
        numpy.ndarray of bool
            True for each sample that has a committed m.
        """
        return self.checks(samples) != 0

    def checks(self, samples: Iterable[int]) -> Any:
        """Return the checks of the committed m of samples.

        A sample with equal checks on both sides has bit-identical m there. To avoid a refused step after a restart,
        compare the checks of both sides, and call :meth:`forget` for samples whose checks differ.

        Parameters
        ----------
        samples : iterable of int
            Sample ids.

        Returns
        -------
        numpy.ndarray of uint64
            Check of each sample; 0 if the sample has no m.
        """
        return self._ledger.checks(ids_of(samples))

    def state_dict(self, *, like: Any = None) -> dict[str, Any]:
        """Return the committed m of all samples as copies: a dict of arrays, integers and strings.

        Saving it in a checkpoint is optional: without it, all samples are sent raw once after a restart. If the other
        side was restarted with another state, the checks in messages detect this. If both sides load their states, the
        messages after a restart have the values of an uninterrupted run, also with stochastic rounding.

        If m is stored in files, the dict contains only the check of each m, and this method first waits until all m
        are on the disk.

        Parameters
        ----------
        like : array or tensor, optional
            Array whose library the arrays of the dict have. Pass a torch tensor for ``torch.load``, which refuses numpy
            arrays by default. Default: numpy.

        Returns
        -------
        dict
            State for :meth:`load_state_dict`.

        Raises
        ------
        ArgumentError
            `like` is not an array or tensor.
        StateError
            A file cannot be written to the disk.
        """
        self.flush()
        draws = self._committed_draws if self._ledger.in_step else self._sender.draws
        return state.save(self._ledger, self._traffic.edge, draws, like)

    def load_state_dict(self, saved: Any) -> None:
        """Replace m of all samples by copies of those in a state dict.

        If m was stored in files when the state dict was saved, this object must use the same folder as its store.
        Samples whose m in the files differs from the saved one are forgotten.

        Parameters
        ----------
        saved : mapping
            Return value of :meth:`state_dict` of an object with the same edge and dtype; it may have been saved and
            loaded by numpy or torch.

        Raises
        ------
        StateError
            `saved` is not such a state dict, or this object has messages that are neither committed nor rolled back.
            The state is unchanged.
        """
        load_all([(self, saved)])

    def _checked(self, saved: Any) -> state.ActivationState:
        """Return a state that :meth:`_adopt` may load; raise StateError if it is invalid for this object."""
        if self._ledger.in_step:
            raise StateError(
                "a state cannot be loaded while messages of a step are pending: call commit() or rollback() first"
            )
        loaded = state.load(saved, self._traffic.entries, self._traffic.edge)
        if loaded.contents is None and not self._ledger.store.persistent:
            raise StateError(
                "the stored activations of this state dict are in files: create ActivationDelta with their folder as "
                "store="
            )
        return loaded

    def _adopt(self, loaded: state.ActivationState) -> None:
        """Replace the state by one that :meth:`_checked` has returned."""
        self._ledger.replace(loaded.entries, loaded.contents)
        self._sender.draws = self._committed_draws = loaded.draws
        self._traffic.restart()

    def stats(self) -> ActivationStats:
        """Return counts of messages and entries, and the relative change of activations between visits."""
        ledger = self._ledger
        return replace(
            self._traffic.counts,
            entries=len(ledger.entries),
            entries_nbytes=ledger.nbytes,
            evicted=ledger.evicted,
            damaged=ledger.damaged,
            change=self._change.by_visit(),
        )

    def _sent(self, message: bytes, out: Any, staging: list[Staging] | None = None) -> bytes | memoryview:
        """Stage the updates of m, count the message, and return the message, or its copy in `out` if `out` is given."""
        result = message if out is None else write_message(message, out)
        staging = staging or []
        self._ledger.stage(staging)
        raw = sum(len(s.samples) for s in staging if s.visits[:1] == [0])
        self._sender.draws += 1
        self._traffic.sent(len(message), raw, sum(len(s.samples) for s in staging) - raw)
        return result

    def _received(self, message: Any, options: CallOptions | None) -> tuple[Message, TensorView]:
        """Parse a message, check that this side may decode it, and return it with the view of its bytes."""
        settings_of(options)
        v = fetch("the message", view_bytes(message))
        m = parse(v.array())
        self._traffic.check(m.head)
        return m, v

    def _accept(self, m: Message, nbytes: int, out: Any, raw: int = 0, deltas: int = 0) -> None:
        self._traffic.received(m.head, nbytes, raw, deltas)
        mark_written(out)


def load_all(states: Iterable[tuple[ActivationDelta, Any]]) -> None:
    """Replace the states of several objects by saved ones; if one of these is invalid, change nothing.

    Raises
    ------
    StateError
        As :meth:`ActivationDelta.load_state_dict`.
    """
    checked = [(each, each._checked(saved)) for each, saved in states]  # pyright: ignore[reportPrivateUsage]
    for each, loaded in checked:
        each._adopt(loaded)  # pyright: ignore[reportPrivateUsage]
