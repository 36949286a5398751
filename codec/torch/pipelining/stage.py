"""Pipeline stage that sends compressed activations and gradients."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from codec import ArgumentError, CallOptions, StateError
from codec._options import settings_of
from codec.arguments import check_timeout, shown
from codec.specs import Spec
from codec.stateful.activation.values import ids_of
from codec.torch import _compat
from codec.torch.auto.quality import Auto
from codec.torch.pipelining import checkpoint
from codec.torch.pipelining.envelope import MessageKind
from codec.torch.pipelining.settings import BACKWARD, FORWARD, Deltas, specs_of
from codec.torch.pipelining.snapshot import ModuleBuffers
from codec.torch.pipelining.stats import PipelineStats, stats_of
from codec.torch.pipelining.traffic import StageTraffic

_compat.check_stage_class(PipelineStage)


class CompressedStage(PipelineStage):
    """Pipeline stage that sends activations as deltas from those of the last epoch (AQ-SGD), or quantized directly.

    Provisional: may change in any version.

    It replaces :class:`torch.distributed.pipelining.PipelineStage` with every schedule of that package. Activations are
    encoded with :class:`codec.ActivationDelta`; gradients are quantized. Messages use separate TCP connections.

    Each training step must run inside :func:`attempts`. On the first stage, pass the sample ids to the schedule:
    ``schedule.step(x, sample_ids=ids)``, with `ids` an int64 tensor in the order of `x`. They are not passed to the
    module. Other stages receive the ids in messages; ids passed there are compared with the received ones. Evaluation
    with ``schedule.eval()`` needs no ids, and changes no state.

    Outputs of stages should be float32, bfloat16 or float16 tensors whose first dimension counts samples. Tensors of
    other dtypes are sent losslessly. CUDA tensors are copied through host memory.

    Parameters
    ----------
    submodule : torch.nn.Module
        Module of this stage, not wrapped by DistributedDataParallel or FSDP.
    stage_index, num_stages : int
        Number of this stage, and number of stages.
    device : torch.device or str
        Device of the module.
    forward : Spec, str or Auto
        Codec, or name of a preset, for deltas, or for activations that are sent directly. With "auto" or
        :class:`codec.torch.Auto`, the bits per value are chosen from measurements, for each direction of each edge, and
        equally on all ranks. The choice is the largest number of bits with which a step is about as fast as with the
        smallest number that the quality allows. It changes when link speeds change.
    backward : Spec, str or Auto
        Codec for gradients, or the same "auto" as `forward`.
    activations : {"delta", "direct"} or Deltas
        "delta": send deltas with the default settings, ``Deltas()``. "direct": send activations without deltas; this
        needs no state and no sample ids.
    options : CallOptions, optional
        ``codec.options(timeout=, engine=, threads=)``. The timeout is the longest wait for a neighbour; default: the
        timeout of the group.
    **stage_arguments
        Further arguments of PipelineStage: `input_args`, `output_args`, `group`, `dw_builder` and others.

    Raises
    ------
    ArgumentError, SpecError
        An argument has an invalid type or value.
    EngineError
        This version of torch is not supported.

    Examples
    --------
    >>> from torch.distributed.pipelining import ScheduleGPipe
    >>> from codec.torch.pipelining import CompressedStage, attempts
    >>> stage = CompressedStage(torch.nn.Linear(8, 8), 0, 1, "cpu")  # a pipeline of one stage
    >>> schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    >>> x, ids = torch.randn(4, 8), torch.arange(4)
    >>> for attempt in attempts(stage):
    ...     with attempt:
    ...         y = schedule.step(x, target=x, sample_ids=ids)
    >>> y.shape
    torch.Size([4, 8])
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: Any,
        *,
        forward: Spec | str | Auto = FORWARD,
        backward: Spec | str | Auto = BACKWARD,
        activations: Literal["delta", "direct"] | Deltas = "delta",
        options: CallOptions | None = None,
        **stage_arguments: Any,
    ) -> None:
        check_timeout(settings_of(options).timeout)
        if isinstance(submodule, DistributedDataParallel | FSDPModule):
            raise ArgumentError(
                f"the module of a stage must not be wrapped, got {type(submodule).__name__}, which sends gradients "
                "before all stages have succeeded: send gradients after the step, as docs/methods/pipelines.md shows"
            )
        super().__init__(submodule, stage_index, num_stages, torch.device(device), **stage_arguments)
        _compat.check_stage(self)
        specs = specs_of(forward, backward, _deltas_of(activations))
        self._spoilt: ModuleBuffers | None = None  # buffers of the module to restore before the next forward
        # Inputs, and shapes of outputs, of the micro-batches of this step.
        self._inputs: dict[int, list[torch.Tensor | None]] = {}
        self._output_shapes: dict[int, list[torch.Size]] = {}
        # Not part of the public API: Attempt uses it to commit and roll back. The rank of a neighbour is looked up
        # lazily, since a schedule may assign stages to ranks after their creation.
        self.traffic = StageTraffic(
            stage_index, num_stages, specs, self.group, options, lambda i: self.stage_index_to_group_rank[i]
        )

    def __repr__(self) -> str:
        return f"<codec.torch.pipelining.CompressedStage {self.stage_index} of {self.num_stages}>"

    def stats(self) -> PipelineStats:
        """Return bytes sent and counts of samples so far."""
        traffic = self.traffic
        choices = {} if traffic.auto is None else traffic.auto.steps.copy()
        return stats_of(traffic.incoming, traffic.outgoing, traffic.refused_steps, choices)

    def prefetch(self, sample_ids: Any) -> None:
        """Start to read m, the stored activations, of samples of the next step, if m is stored in files.

        Parameters
        ----------
        sample_ids : iterable of int
            Ids of the samples.
        """
        ids = ids_of(sample_ids)
        for end in self.traffic.ends:
            for d in end.deltas:
                d.prefetch(ids)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of deltas (m of all samples, on both edges of this stage), and the choice of "auto".

        Saving it is optional: without it, a restarted run sends all samples raw once. If m is stored in files, the dict
        contains only hashes that identify m.

        Returns
        -------
        dict
            Tensors, integers and strings, which ``torch.load(weights_only=True)`` accepts.
        """
        auto = self.traffic.auto
        return checkpoint.save(self.traffic.ends) | ({} if auto is None else {"auto": auto.state_dict()})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replace the state of deltas by a saved one.

        Parameters
        ----------
        saved : mapping
            From :meth:`state_dict` of the same stage.

        Raises
        ------
        StateError
            `saved` is not such a state dict, is of another stage, or a step is in progress.
        """
        if self.traffic.notes is not None:
            raise StateError("the state of a stage cannot be loaded inside an attempt")
        self.traffic.load_choice(checkpoint.load(self.traffic.ends, saved))

    def close(self) -> None:
        """If m, the stored activations, is in files, write and close them. The stage must not be used afterwards."""
        for end in self.traffic.ends:
            for d in end.deltas:
                d.close()

    # The methods below override methods that torch's schedules call.

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, *rest: Any, **named: Any
    ) -> Any:
        kwargs, _ = _without_ids(kwargs)
        # To find the shapes of outputs, torch runs the module on uninitialized memory, which corrupts running
        # statistics. Before the first forward, torch may also run a backward pass from these outputs. Autograd needs
        # unchanged buffers for that, so the buffers are restored only when the first forward begins.
        self._spoilt = ModuleBuffers([self.submod])
        # Torch 2.14 and later have a backup, too, but fail to restore expanded buffers and ignore assigned ones.
        self._metadata_inference_buffer_backup = None
        try:
            return super()._prepare_forward_infra(num_microbatches, args, kwargs, *rest, **named)
        except BaseException:
            self._restore_buffers()
            raise

    def _restore_buffers(self) -> None:
        """Restore the module's buffers that torch has overwritten when it determined output shapes."""
        spoilt, self._spoilt = self._spoilt, None
        if spoilt is not None:
            spoilt.restore()

    def clear_runtime_states(self) -> None:
        """Begin a run of the schedule."""
        super().clear_runtime_states()
        self._inputs.clear()
        self._output_shapes.clear()
        self.traffic.begin_run(training=self.has_backward)

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *rest: Any, **named: Any) -> Any:
        """Receive activations, then compute the output of a micro-batch."""
        self._restore_buffers()
        kwargs, ids = _without_ids(kwargs)
        self.traffic.take_ids(fwd_chunk_id, ids)
        received = self.traffic.receive(MessageKind.ACTIVATIONS, fwd_chunk_id)
        if received:
            for info, tensor in zip(self.args_recv_info[fwd_chunk_id], received, strict=True):
                info.buffer = tensor
        if self.has_backward and not self.is_first:
            self._inputs[fwd_chunk_id] = [info.buffer for info in self.args_recv_info[fwd_chunk_id]]
        output: Any = super().forward_one_chunk(fwd_chunk_id, args, kwargs, *rest, **named)
        if self.has_backward and not self.is_last:
            outputs: list[torch.Tensor] = [output] if isinstance(output, torch.Tensor) else list(output)
            self._output_shapes[fwd_chunk_id] = [_compat.local(x).shape for x in outputs]
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **named: Any) -> None:
        """Receive the gradients of the outputs, then run the backward pass of a micro-batch."""
        self.traffic.receive(MessageKind.GRADIENTS, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **named)  # pyright: ignore[reportUnknownMemberType]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send activations. Return no operations, so that the schedule sends nothing itself."""
        return self._send(MessageKind.ACTIVATIONS, fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send gradients. Return no operations, so that the schedule sends nothing itself."""
        if bwd_chunk_id in self.bwd_cache and not self.is_first:
            # For inputs without a gradient, torch would send zeros with the shape of the first step. Use this shape.
            gradients = zip(self._inputs.pop(bwd_chunk_id), self.bwd_cache[bwd_chunk_id], strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(x) if g is None and x is not None and x.requires_grad else g for x, g in gradients
            )
        return self._send(MessageKind.GRADIENTS, bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Start to receive activations. Return no operations, so that the schedule receives nothing itself."""
        self._expect(
            MessageKind.ACTIVATIONS, fwd_chunk_id, [op.tensor for op in super().get_fwd_recv_ops(fwd_chunk_id)]
        )
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Start to receive gradients. Return no operations, so that the schedule receives nothing itself."""
        if super().get_bwd_recv_ops(bwd_chunk_id):
            infos = self._gradient_infos(bwd_chunk_id)
            # Torch's buffers have the shapes of the first step, from which this micro-batch may differ.
            for info, shape in zip(infos, self._output_shapes[bwd_chunk_id], strict=True):
                if info.buffer is not None and info.buffer.shape != shape:
                    info.buffer = torch.empty(shape, dtype=info.buffer.dtype, device=info.buffer.device)
            self._expect(
                MessageKind.GRADIENTS, bwd_chunk_id, [info.buffer for info in infos if info.buffer is not None]
            )
        return []

    def _gradient_infos(self, chunk: int) -> list[Any]:
        """Return torch's records of the gradients of a micro-batch's outputs, with the buffers to receive into."""
        stage: Any = self  # torch has no type for these
        return list(stage.grad_recv_info[chunk])

    def _send(self, kind: MessageKind, chunk: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if ops:
            self.traffic.send(kind, chunk, [op.tensor for op in ops])
        return []

    def _expect(self, kind: MessageKind, chunk: int, tensors: list[torch.Tensor]) -> None:
        if tensors:
            self.traffic.expect(kind, chunk, tensors)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of the outputs from the next stage, which is on this rank, too."""
        # For a missing gradient, torch would use zeros with the shape of the first step.
        infos = self._gradient_infos(mb_index)
        given = zip(next_stage_bwd_outputs, infos, self._output_shapes[mb_index], strict=True)
        gradients = tuple(
            torch.zeros(shape, dtype=info.tensor_meta.dtype, device=self.device)
            if g is None and info.tensor_meta
            else g
            for g, info, shape in given
        )
        super().set_local_bwd_input(gradients, mb_index)


def _deltas_of(activations: Any) -> Deltas | None:
    if isinstance(activations, Deltas):
        return activations
    if isinstance(activations, str) and activations in ("delta", "direct"):
        return Deltas() if activations == "delta" else None
    raise ArgumentError(f'activations must be "delta", "direct" or Deltas, got {shown(activations)}')


def _without_ids(kwargs: Any) -> tuple[dict[str, Any], Any]:
    """Split the keywords of a schedule into those of the module and the sample ids."""
    kwargs = dict(kwargs or {})
    return kwargs, kwargs.pop("sample_ids", None)
