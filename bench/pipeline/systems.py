"""Compared systems: the messages between stages, and the torch.distributed.pipelining stages that send them."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tah_quant import BITS, GRADIENT_BITS, HIGH, LOW, TahQuant, activation_nbytes
from torch.distributed.pipelining import PipelineStage

import codec
import codec.torch
from codec.torch.pipelining import CompressedStage, Deltas, attempts

FP32, FP32_TCP, DIRECT, AQ, TAH = "fp32", "fp32-tcp", "direct", "aq", "tah"
SYSTEMS = (FP32, FP32_TCP, DIRECT, AQ, TAH)
BITS_OF = ("fw4bw8", "fw3bw6", "fw2bw4")
TITLES = {FP32: "FP32", FP32_TCP: "FP32, codec.torch.send", DIRECT: "DirectQ", AQ: "AQ-SGD", TAH: "TAH-Quant"}
EDGE_STEP = 1 << 8  # CompressedStage gives the first tensor of edge e the number e << 8, which selects random bits


@dataclass(frozen=True)
class Setting:
    """System, with its bits per activation and per gradient. `store` is AQ-SGD's storage of m: "ram" or "files"."""

    system: str
    bits: str = ""
    store: str = "ram"
    dtype: Any = "float32"

    @property
    def label(self) -> str:
        kept = "" if self.store == "ram" else f", m in {self.store} as {self.dtype}"
        bits = f"fw{LOW}-{HIGH} bw{GRADIENT_BITS}" if self.system == TAH else self.bits.replace("bw", " bw")
        return f"{TITLES[self.system]} {bits}".strip() + kept

    @property
    def forward(self) -> codec.Quantize:
        return codec.Quantize(parse_bits(self.bits)[0], rounding="nearest")

    @property
    def backward(self) -> codec.Quantize:
        return codec.Quantize(parse_bits(self.bits)[1])


def parse_bits(text: str) -> tuple[int, int]:
    """Parse a text such as "fw4bw8"; return the bits of activations and of gradients.

    Raises
    ------
    ValueError
        The text has another form.
    """
    match = re.fullmatch(r"fw([1-8])bw([1-8])", text)
    if match is None:
        raise ValueError(f"bits are written fw4bw8: 1 to 8 bits forward, 1 to 8 backward; got {text!r}")
    return int(match[1]), int(match[2])


def settings_of(systems: Iterable[str], bits: Iterable[str]) -> list[Setting]:
    """Return the settings of systems: one per item of `bits` for systems with a choice of bits, otherwise one."""
    bits = list(bits)
    found: list[Setting] = []
    for system in systems:
        found += [Setting(system, b) for b in bits] if system in (DIRECT, AQ) else [Setting(system)]
    return found


class Raw:
    """Side of an edge that sends uncompressed float32, with the interface of codec.ActivationDelta."""

    def encode(self, activation: Any, samples: Iterable[int] | None = None) -> bytes:
        return np.asarray(activation, np.float32).tobytes()

    def decode(self, message: Any, samples: Iterable[int] | None = None, *, out: Any) -> Any:
        x = np.asarray(out)
        x[...] = np.frombuffer(message, np.float32).reshape(x.shape)
        return out

    def encode_gradient(self, gradient: Any) -> bytes:
        return self.encode(gradient)

    def decode_gradient(self, message: Any, *, out: Any) -> Any:
        return self.decode(message, out=out)

    def commit(self) -> None:
        """Do nothing: there is no state."""


def side_of(setting: Setting, edge: int, role: int, seed: int = 0) -> Any:
    """Return one side of an edge. Role 0 sends activations, role 1 receives activations."""
    if setting.system in (FP32, FP32_TCP):
        return Raw()
    if setting.system == TAH:
        return TahQuant([seed, edge + 1, role])
    first: dict[str, Any] = {"first": setting.forward} if setting.system == DIRECT else {}
    return codec.ActivationDelta(setting.forward, backward=setting.backward, edge=edge * EDGE_STEP, **first)


def uses_samples(setting: Setting) -> bool:
    """Return True if messages contain the ids of samples."""
    return setting.system == AQ


class MessageStage(PipelineStage):
    """Stage that sends tensors as messages of a coder, over the same connections as CompressedStage."""

    def __init__(self, module: torch.nn.Module, index: int, stages: int, make: Callable[[int, int], Any], group: Any):
        super().__init__(module, index, stages, torch.device("cpu"), group=group)
        self._incoming, self._outgoing = make(index - 1, 1), make(index, 0)
        self._peers = {"before": index - 1, "after": index + 1}  # ranks of the neighbouring stages
        self._expected: dict[tuple[str, int], tuple[torch.Tensor, Any]] = {}
        self._sends: list[Any] = []

    def _send(self, to: str, message: bytes) -> None:
        self._sends.append(codec.torch.send(message, self._peers[to], group=self.group, async_op=True))

    def _expect(self, kind: str, chunk: int, source: str, ops: list[Any]) -> list[Any]:
        for op in ops:
            work = codec.torch.recv(self._peers[source], group=self.group, async_op=True)
            self._expected[kind, chunk] = op.tensor, work
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        for op in super().get_fwd_send_ops(fwd_chunk_id):
            self._send("after", self._outgoing.encode(op.tensor.detach()))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        for op in super().get_bwd_send_ops(bwd_chunk_id):
            self._send("before", self._incoming.encode_gradient(op.tensor.contiguous()))
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._expect("forward", fwd_chunk_id, "before", super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._expect("backward", bwd_chunk_id, "after", super().get_bwd_recv_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        if ("forward", fwd_chunk_id) in self._expected:
            tensor, work = self._expected.pop(("forward", fwd_chunk_id))
            self._incoming.decode(work.result(), out=tensor.detach())
        return super().forward_one_chunk(fwd_chunk_id, *args, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **named: Any) -> None:
        if ("backward", bwd_chunk_id) in self._expected:
            tensor, work = self._expected.pop(("backward", bwd_chunk_id))
            self._outgoing.decode_gradient(work.result(), out=tensor.detach())
        super().backward_one_chunk(bwd_chunk_id, *args, **named)

    def wait(self) -> None:
        """Wait until all messages are sent."""
        while self._sends:
            self._sends.pop().wait()


def stage_of(
    setting: Setting, module: torch.nn.Module, index: int, stages: int, *, group: Any = None, folder: str = ""
) -> PipelineStage:
    """Return a stage of the pipeline. `folder` is the directory for m if m is stored in files."""
    if setting.system == FP32:
        return PipelineStage(module, index, stages, torch.device("cpu"), group=group)
    if setting.system in (FP32_TCP, TAH):
        return MessageStage(module, index, stages, lambda edge, role: side_of(setting, edge, role), group)
    kept = "direct" if setting.system == DIRECT else Deltas(store=folder or "ram", dtype=setting.dtype)
    specs: dict[str, Any] = {"forward": setting.forward, "backward": setting.backward}
    return CompressedStage(module, index, stages, "cpu", activations=kept, group=group, **specs)


def steps_of(stage: PipelineStage) -> Iterator[AbstractContextManager[Any]]:
    """Yield, for each attempt of a training step, the context manager in which to run the schedule."""
    if isinstance(stage, CompressedStage):
        yield from attempts(stage)
    else:
        yield nullcontext()
        if isinstance(stage, MessageStage):
            stage.wait()


def message_nbytes(setting: Setting, values: int, samples: int) -> int:
    """Return the size in bytes of the smallest message after the first epoch, for a micro-batch."""
    if setting.system in (FP32, FP32_TCP):
        return 4 * values
    if setting.system == TAH:
        return activation_nbytes(values, samples=samples)
    scales = 4 * values // setting.forward.group_size
    return min(parse_bits(setting.bits)) * values // 8 + scales


def allowed_speedup(setting: Setting) -> float:
    """Return the upper bound of the speedup over FP32 from bytes after the first epoch, message heads excluded."""
    if setting.system in (FP32, FP32_TCP):
        return 1.0
    if setting.system == TAH:
        return 64 / (BITS + 34 / 64 + GRADIENT_BITS + 16 / 32)
    forward, backward = parse_bits(setting.bits)
    return 64 / (forward + backward + 2 * 32 / setting.forward.group_size)
