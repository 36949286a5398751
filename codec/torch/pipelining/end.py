"""Encode and decode the messages on one stage's side of the edge to a neighbouring stage."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
import torch

import codec
from codec import ActivationDelta, ArgumentError, CallOptions, Status
from codec.stateful.activation.message import ContentKind as DeltaKind
from codec.stateful.activation.message import parse
from codec.stateful.activation.values import shown_samples
from codec.torch.auto.edges import EdgeChoice, Sending
from codec.torch.pipelining.envelope import MOST_TENSORS, MessageKind, Place, Shape, envelope_nbytes, pack, unpack
from codec.torch.pipelining.host import on_host, write
from codec.torch.pipelining.settings import LOSSLESS, Specs
from codec.torch.reduction.arguments import NAMES

Ids = list[int]
# Activations with a new shape may have at most _MOST_NBYTES bytes, or _GROWTH times the bytes of the earlier ones.
_MOST_NBYTES = 1 << 30
_GROWTH = 4


class Aborted(Exception):
    """Raised when the neighbour's message says that it has aborted the step."""


class End:
    """One side of an edge between two stages. It has an ActivationDelta for each tensor that is sent over the edge.

    Parameters
    ----------
    edge : int
        Number of the edge, equal to the number of the stage that sends activations.
    role : {"sender", "receiver"}
        Role of this side for activations.
    specs : Specs
        Specs of the stage.
    options : CallOptions or None
        Settings of encoding and decoding.

    Raises
    ------
    ArgumentError, SpecError
        A spec or a setting of deltas is invalid.
    """

    def __init__(self, edge: int, role: str, specs: Specs, options: CallOptions | None) -> None:
        self.edge, self.role = edge, role
        self._specs, self._options = specs, options
        self.sent = dict.fromkeys(MessageKind, 0)  # total bytes of sent messages, by kind
        self.sent_raw_nbytes = 0  # total bytes of the tensors in these messages, before compression
        self.sending = Sending(edge, MessageKind.ACTIVATIONS if role == "sender" else MessageKind.GRADIENTS)
        self._deltas: list[ActivationDelta] = []
        self.delta(0)

    def delta(self, index: int) -> ActivationDelta:
        """Return the ActivationDelta of the `index`-th tensor; the first call creates it."""
        if index >= MOST_TENSORS:
            raise ArgumentError(f"a stage has too many outputs; the maximum is {MOST_TENSORS}")
        while len(self._deltas) <= index:
            self._deltas.append(self._new_delta(len(self._deltas)))
            if self._specs.auto is not None:
                self.use(self._specs.auto)
        return self._deltas[index]

    @property
    def deltas(self) -> list[ActivationDelta]:
        """ActivationDelta of each tensor so far."""
        return self._deltas

    def max_nbytes(self, kind: MessageKind, tensors: Sequence[torch.Tensor]) -> int:
        """Return an upper bound of the size in bytes of a message with tensors of these shapes and dtypes.

        For activations, the bound includes the other shapes that :meth:`decode` accepts.
        """
        total = envelope_nbytes(t.shape for t in tensors)
        for i, t in enumerate(tensors):
            if t.dtype in NAMES:
                total += self.delta(i).bound(t.shape, t.dtype)
            else:
                total += codec.bound(t.shape, t.dtype, LOSSLESS)
        return total if kind == MessageKind.GRADIENTS else max(_MOST_NBYTES, _GROWTH * total)

    def encode(self, kind: MessageKind, tensors: Sequence[torch.Tensor], place: Place, samples: Ids | None) -> bytes:
        """Encode tensors as one message.

        Parameters
        ----------
        kind : MessageKind
            ACTIVATIONS or GRADIENTS.
        tensors : sequence of torch.Tensor
            Tensors. The first dimension of activations counts samples.
        place : Place
            Micro-batch and run of the message.
        samples : list of int or None
            Ids of the samples; None: encode activations without deltas. Ignored for gradients.

        Raises
        ------
        ArgumentError, SpecError, EngineError
            A tensor cannot be encoded, such as a gradient with NaN.
        """
        part = self._gradient_part if kind == MessageKind.GRADIENTS else self._activation_part
        parts = [part(i, on_host(t), samples) for i, t in enumerate(tensors)]
        message = pack(kind, place, [tuple(t.shape) for t in tensors], parts)
        self.sent[kind] += len(message)
        self.sent_raw_nbytes += sum(t.nbytes for t in tensors)
        if self._specs.auto is not None:
            self.sending.add(self._chosen_values(kind, tensors, parts), len(message))
        return message

    def _chosen_values(self, kind: MessageKind, tensors: Sequence[torch.Tensor], parts: Sequence[bytes]) -> int:
        """Return the number of values in a message that were encoded with specs chosen by "auto"."""
        total = 0
        for t, part in zip(tensors, parts, strict=True):
            if t.dtype in NAMES and kind == MessageKind.ACTIVATIONS and self._specs.deltas is not None:
                checks = parse(np.frombuffer(part, np.uint8)).checks
                total += int(np.count_nonzero(checks)) * t[0].numel() if len(checks) else 0
            elif t.dtype in NAMES:
                total += t.numel()
        return total

    def use(self, auto: EdgeChoice) -> None:
        """Set the specs of this edge to those that "auto" has chosen."""
        for d in self._deltas:
            d.backward = auto.spec(self.edge, MessageKind.GRADIENTS)
            forward = auto.spec(self.edge, MessageKind.ACTIVATIONS)
            if self._specs.deltas is None:
                d.first = forward
            else:
                d.spec = forward

    def decode(
        self, kind: MessageKind, message: bytes, outputs: list[torch.Tensor], place: Place, samples: Ids | None
    ) -> Ids | None:
        """Decode a message, and write its tensors to `outputs`.

        Activations may have another shape than their output, with the same number of dimensions, since batch size and
        sequence length vary. Such an output is replaced by a new tensor, even if decoding then fails, so that the step
        can continue with tensors of the right shape. The new tensor may have at most 1 GiB, or 4 times the bytes of
        the output if that is more.

        Parameters
        ----------
        kind, place
            As for :meth:`encode`.
        message : bytes
            Message from the neighbour.
        outputs : list of torch.Tensor
            Tensors to write to; activations with another shape replace their item of the list.
        samples : list of int or None
            Sample ids that the message must contain; None: accept any.

        Returns
        -------
        list of int or None
            Sample ids in the message; None if it has none.

        Raises
        ------
        Aborted
            The neighbour has aborted the step.
        CodecError
            The message is damaged, refers to another m, or belongs to another micro-batch or run. For a StateError,
            ``item`` contains the ids of samples whose m is missing or different.
        """
        contents = unpack(message, kind, place, len(outputs))
        for i, shape in enumerate(contents.shapes):
            if _may_become(kind, outputs[i], shape):
                outputs[i] = torch.empty(shape, dtype=outputs[i].dtype, device=outputs[i].device)
        if contents.parts is None:
            raise Aborted
        self._check_shapes(kind, outputs, contents.shapes)
        found: Ids | None = None
        for i, (part, output) in enumerate(zip(contents.parts, outputs, strict=True)):
            if output.dtype in NAMES and kind == MessageKind.ACTIVATIONS:
                found = self._samples_of(part, samples) or found
            self._write(kind, i, part, output)
        return found

    def commit(self) -> None:
        """Commit m, the activations to store that this step has computed for its samples."""
        for d in self._deltas:
            d.commit()

    def rollback(self) -> None:
        """Drop the m that this step has computed for its samples; the stored m is unchanged."""
        for d in self._deltas:
            d.rollback()

    def forget(self, samples: Iterable[int]) -> None:
        """Remove m, the stored activations, of samples, so that these samples are sent raw the next time."""
        ids = list(samples)
        for d in self._deltas:
            d.forget(ids)

    def _new_delta(self, index: int) -> ActivationDelta:
        specs, number = self._specs, self.edge * MOST_TENSORS + index
        d = specs.deltas
        if d is None:
            return ActivationDelta(backward=specs.backward, first=specs.forward, edge=number)
        store = d.store
        if not (isinstance(store, str) and store == "ram"):
            with suppress(TypeError):  # an invalid store: ActivationDelta raises the error
                store = Path(store) / f"edge-{self.edge}-{self.role}-{index}"
        return ActivationDelta(
            specs.forward,
            backward=specs.backward,
            first=d.first,
            store=store,
            budget=d.budget,
            dtype=d.dtype,
            edge=number,
        )

    def _activation_part(self, index: int, t: torch.Tensor, samples: Ids | None) -> bytes:
        if t.dtype not in NAMES:
            return bytes(codec.encode(t, LOSSLESS, options=self._options))
        ids = None if self._specs.deltas is None else samples
        return bytes(self.delta(index).encode(t, ids, options=self._options))

    def _gradient_part(self, index: int, t: torch.Tensor, _: Ids | None) -> bytes:
        if t.dtype not in NAMES:
            return bytes(codec.encode(t, LOSSLESS, options=self._options))
        message = bytes(self.delta(index).encode_gradient(t, options=self._options))
        if parse(np.frombuffer(message, np.uint8)).head.kind == DeltaKind.POISON:
            raise ArgumentError(f"the gradient of edge {self.edge} holds NaN or Inf", Status.NONFINITE)
        return message

    def _check_shapes(self, kind: MessageKind, outputs: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> None:
        """Raise ArgumentError unless the outputs have the shapes that a message declares."""
        for output, shape in zip(outputs, shapes, strict=True):
            if output.shape != shape:
                raise ArgumentError(
                    f"the {kind.name.lower()} of edge {self.edge} must have shape {tuple(output.shape)}, got {shape}: "
                    "gradients must have the shape of the activations, and activations as many dimensions as the first "
                    "ones"
                )

    def _samples_of(self, part: memoryview, expected: Ids | None) -> Ids:
        found: Ids = parse(np.frombuffer(part, np.uint8)).samples.tolist()
        if expected is not None and found and found != expected:
            raise ArgumentError(
                f"stage {self.edge} has sent samples {shown_samples(found)}, but stage {self.edge + 1} has the "
                f"sample_ids {shown_samples(expected)}: pass the same ids on all ranks, or on the first stage only"
            )
        return found

    def _write(self, kind: MessageKind, index: int, part: memoryview, output: torch.Tensor) -> None:
        def decode(out: torch.Tensor) -> None:
            if output.dtype not in NAMES:
                codec.decode(part, out=out, options=self._options)
            elif kind == MessageKind.GRADIENTS:
                self.delta(index).decode_gradient(part, out=out, options=self._options)
            else:
                self.delta(index).decode(part, out=out, options=self._options)

        write(output, decode)


def _may_become(kind: MessageKind, output: torch.Tensor, shape: Shape) -> bool:
    """Return True if `output` may be replaced by a tensor of `shape`: for activations, within the size limit."""
    if kind == MessageKind.GRADIENTS or output.shape == shape or len(shape) != output.dim():
        return False
    return prod(shape) * output.itemsize <= max(_MOST_NBYTES, _GROWTH * output.nbytes)
