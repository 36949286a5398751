"""Buckets of gradients: their parameters, offsets and order in memory, and the optimizer state that Truncate needs."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist

from codec import ArgumentError, SpecError, optimizers
from codec._c.library import lib
from codec.explain import CARRIES_NONFINITE, bits_of, count_nonfinite
from codec.optimizers.from_torch import check_known
from codec.optimizers.wrappers import unwrapped
from codec.specs import Spec, SpecLike, Truncate
from codec.stateful.ranges import NOBODY, Layout, numel
from codec.tensors.segments import Records, pack, segments
from codec.tensors.view import view
from codec.torch._compat import divides_by_ranks_with_inputs, local
from codec.torch.reduction import arguments
from codec.torch.reduction.host import Reduction, Values

# The whole bucket is encoded, instead of a copy of its largest part, if the other parts have at most this share of the
# bucket's values.
_MAX_OTHERS = 1 / 32

PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp must be "ddp_optimizer", torch\'s default, got "python_reducer", which passes '
    "single gradients to hooks inside of a compiled graph"
)


def n_values(parameter: torch.Tensor) -> int:
    """Return the number of values of a parameter, or of its shard, in a bucket; a complex value counts as two."""
    return local(parameter).numel() * (2 if parameter.is_complex() else 1)


def sizes_of(names: Mapping[torch.nn.Parameter, str]) -> dict[str, int]:
    """Return the number of values that each parameter has in a bucket, by parameter name."""
    return {name: n_values(p) for p, name in names.items()}


def names_in(parameters: Sequence[torch.nn.Parameter], names: Mapping[torch.nn.Parameter, str]) -> tuple[str, ...]:
    """Return the names of the parameters of a bucket; raise ArgumentError if `names` lacks one of them."""
    for p in parameters:
        if p not in names:
            raise ArgumentError(
                f"a bucket has a parameter of shape {tuple(p.shape)} that is not one of the hook's model: register "
                "each hook with one model only"
            )
    return tuple(names[p] for p in parameters)


@dataclass(frozen=True)
class Bucket:
    """Gradients of some parameters, which one collective averages."""

    buffer: torch.Tensor  # gradients as one flat tensor, or a sparse tensor
    parameters: Sequence[torch.nn.Parameter]
    number: int  # index of the bucket in the step
    last: bool  # True for the last bucket of the step

    @classmethod
    def of(cls, bucket: dist.GradBucket) -> "Bucket":  # pyright: ignore[reportPrivateImportUsage]
        """Return the bucket that DistributedDataParallel passed to the hook, with its parameters and its index.

        Raises
        ------
        ArgumentError
            The bucket is a tuple: torch.compile's Python reducer has called the hook.
        """
        if isinstance(bucket, tuple):
            raise ArgumentError(PYTHON_REDUCER)
        parameters = cast(list[torch.nn.Parameter], bucket.parameters())
        return cls(bucket.buffer(), parameters, bucket.index(), bucket.is_last())

    @property
    def has_frames(self) -> bool:
        """False if the gradients are sparse or float64, and so cannot be averaged as frames."""
        return not self.buffer.is_sparse and self.buffer.dtype != torch.float64

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of each parameter, as views of the buffer."""
        return gradients_in(self.buffer, self.parameters)

    def explain_nonfinite(self, error: BaseException, names: Mapping[torch.nn.Parameter, str]) -> bool:
        """Add the parameter's name and the index of the value to an error, if this bucket holds NaN or Inf.

        Return True if it does.
        """
        for p, gradient in zip(self.parameters, self.gradients(), strict=True):
            values = view(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
            if found := count_nonfinite(bits_of(values), values.dtype, values.shape):
                error.args = (
                    f"the gradient of {names[p]!r} holds {found}. The step is refused on all ranks: skip the batch, "
                    "pass grad_scaler= to ddp_hook if a GradScaler scales the loss, or use the spec "
                    f"{CARRIES_NONFINITE}",
                )
                return True
        return False


@dataclass
class BucketPart:
    """Parameters of a bucket that have the same spec and the same error feedback.

    If they hold nearly all values of the bucket, the whole bucket is encoded without a copy, and `whole` is True. Its
    frames then also hold the parameters of other parts, under the name NOBODY. The parameters of other parts have no
    residual in this part, and their results are read from their own part.
    """

    spec: Spec
    feedback: bool  # True if error feedback is applied
    names: list[str]
    parameters: list[torch.nn.Parameter]
    offsets: list[int]  # offset of each parameter in the bucket, in values
    whole: bool  # True if frames hold the whole bucket
    number: int = 0  # index of the bucket in its step, times 256, plus index of the part in the bucket
    new: bool = True  # True until a step with this part has succeeded
    out: torch.Tensor | None = None  # result of a whole bucket, from which the model reads its gradients

    @functools.cached_property
    def layout(self) -> Layout:
        """Range (name, 0, number of values) of each parameter, in the order of the part's values."""
        return tuple((name, 0, n_values(p)) for name, p in zip(self.names, self.parameters, strict=True))

    @functools.cached_property
    def segments(self) -> Records:
        """Shapes of the parameters; the encoder computes separate scales for their rows."""
        return pack(segments([shape_of(p) for p in self.parameters]))

    @functools.cached_property
    def n(self) -> int:
        """Number of values of all parameters of the part."""
        return numel(self.layout)


def cut(
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    specs: Sequence[tuple[Spec, bool]],
    number: int = 0,
) -> list[BucketPart]:
    """Group the parameters of a bucket by spec and feedback; a part that is encoded as a whole bucket comes first."""
    sizes = [n_values(p) for p in parameters]
    offsets = [0, *itertools.accumulate(sizes)]
    parts: list[BucketPart] = []
    for key in dict.fromkeys(specs):
        mine = [i for i, its in enumerate(specs) if its == key]
        parts.append(
            BucketPart(*key, [names[i] for i in mine], [parameters[i] for i in mine], [offsets[i] for i in mine], False)
        )
    largest = max(parts, key=lambda part: part.n)
    others = offsets[-1] - largest.n
    if not others:
        largest.whole = True
    elif others <= offsets[-1] * _MAX_OTHERS and not needs_optimizer(largest.spec):
        mine = set(largest.names)
        inside = [name if name in mine else NOBODY for name in names]
        whole = BucketPart(largest.spec, largest.feedback, inside, [*parameters], offsets[:-1], whole=True)
        parts = [whole, *(part for part in parts if part is not largest)]
    for i, part in enumerate(parts):
        part.number = (number << 8) + i
    return parts


def cut_as(
    buckets: Sequence[Sequence[str]],
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    specs: Sequence[tuple[Spec, bool]],
) -> list[BucketPart]:
    """Group the parameters of a single bucket as if they had come in several buckets.

    In its first step, DistributedDataParallel puts all parameters into one bucket, in another order than later. Cutting
    it into the buckets from before a checkpoint makes a resumed run bit-identical to an uninterrupted one.

    Parameters
    ----------
    buckets : sequence of sequences of str
        Names of the same parameters, in the order of each bucket.
    names, parameters, specs
        Contents of the single bucket, as for :func:`cut`.
    """
    offsets = itertools.accumulate((n_values(p) for p in parameters), initial=0)
    offset_of = dict(zip(parameters, offsets, strict=False))
    where = {name: i for i, name in enumerate(names)}
    found: list[BucketPart] = []
    for number, bucket in enumerate(buckets):
        mine = [where[name] for name in bucket]
        parts = cut(bucket, [parameters[i] for i in mine], [specs[i] for i in mine], number)
        for part in parts:
            part.offsets, part.whole = [offset_of[p] for p in part.parameters], False
        found += parts
    return found


def needs_optimizer(spec: Spec) -> bool:
    """Return True if a spec computes the number of bits to keep of each value from the optimizer's state."""
    return isinstance(spec, Truncate) and spec.fixed_level is None


def order(p: torch.Tensor) -> list[int]:
    """Return a parameter's dimensions in the order of its values in a bucket: by stride, if memory has no gaps."""
    p, dims = local(p), list(range(p.dim()))
    in_memory = sorted(dims, key=p.stride, reverse=True)
    return in_memory if not p.is_contiguous() and p.permute(in_memory).is_contiguous() else dims


def shape_of(p: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter's values in a bucket. Leading dimensions are merged to fit CODEC_MAX_RANK."""
    shape = tuple(local(p).permute(order(p)).shape) + ((2,) if p.is_complex() else ())
    extra = len(shape) - lib.CODEC_MAX_RANK
    return shape if extra <= 0 else (prod(shape[: extra + 1]), *shape[extra + 1 :])


def flat(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Flatten a tensor of a parameter's shape to the order in which the parameter's values lie in a bucket."""
    x = local(x).detach().permute(order(p))
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)


def gradients_in(buffer: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return a view of each parameter's gradient in a bucket, with the parameter's shape; complex for complex ones.

    ``GradBucket.gradients()`` is not used: it ignores the order in memory, returns only half of a complex gradient, and
    does not return sparse gradients.
    """
    if buffer.is_sparse:
        return [buffer]  # a sparse gradient is alone in its bucket
    found: list[torch.Tensor] = []
    begin = 0
    for p in parameters:
        values = buffer[begin : begin + n_values(p)]
        begin += n_values(p)
        values = torch.view_as_complex(values.view(-1, 2)) if p.is_complex() else values
        dims = order(p)
        shape = local(p).shape
        found.append(values.view([shape[d] for d in dims]).permute([dims.index(d) for d in range(p.dim())]))
    return found


def scatter(result: Values, r: Reduction, part: BucketPart, buffer: torch.Tensor) -> None:
    """Copy the result of a part into the bucket."""
    if part.whole:
        arguments.publish(result, r, buffer)
        return
    begin = 0
    for offset, (_, _, n) in zip(part.offsets, part.layout, strict=True):
        arguments.publish(result[begin : begin + n], r, buffer[offset : offset + n])
        begin += n


class BucketBuffers:
    """Cached memory for tensors that are concatenated in every step; allocating it would take longer than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[Any, torch.Tensor] = {}

    def joined(self, which: tuple[int, str], tensors: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate tensors. This overwrites the result of the last call with the same pair `which`, (part, name)."""
        n, device = sum(t.numel() for t in tensors), tensors[0].device
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        buffer = self._buffers.get(key := (*which, dtype, device))
        if buffer is None or buffer.numel() < n:
            buffer = self._buffers[key] = torch.empty(n, dtype=dtype, device=device)
        return torch.cat(tensors, out=buffer[:n])


class Optimizers:
    """The argument ``optimizer=`` of a hook.

    Parameters
    ----------
    given : torch.optim.Optimizer, Formula, a list of them, or None
        Argument of the user. Wrappers of Accelerate and Lightning are removed.

    Raises
    ------
    ArgumentError
        The list is empty.
    """

    def __init__(self, given: Any) -> None:
        one = () if given is None else (given,)
        several = cast(Sequence[Any], given) if isinstance(given, list | tuple) else one
        if given is not None and not several:
            raise ArgumentError("optimizer= is an empty list: pass the optimizers of the model")
        self.all: tuple[Any, ...] = tuple(map(unwrapped, several))

    def check_known(self) -> None:
        """Raise ArgumentError unless the formulas for the steps of all optimizers are known."""
        for each in self.all:
            check_known(each)

    def check_has(self, spec: Spec, name: str) -> None:
        """Raise SpecError if the spec of a parameter needs an optimizer, and there is none."""
        if needs_optimizer(spec) and not self.all:
            raise SpecError(f"{spec}, the spec of {name}, needs the state of the optimizer: pass ddp_hook(optimizer=)")

    def check_each_once(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Raise ArgumentError unless each of some parameters is in exactly one optimizer."""
        found: dict[torch.nn.Parameter, int] = {}
        for optimizer in self.all:
            for p in {p for group in optimizer.param_groups for p in group["params"]}:
                found[p] = found.get(p, 0) + 1
        lacking = [name for p, name in names.items() if p not in found]
        twice = [name for p, name in names.items() if found.get(p, 0) > 1]
        if lacking:
            raise ArgumentError(
                f"optimizer= lacks the parameters {_some(lacking)}: pass a list of all optimizers of the model, or "
                "choose another spec for these parameters by policy="
            )
        if twice:
            raise ArgumentError(
                f"several optimizers of optimizer= have the parameters {_some(twice)}, so that the step is not known: "
                "pass the optimizer that changes them, or choose another spec for them by policy="
            )

    def bind(self, part: BucketPart, scale: float, buffers: BucketBuffers, number: int) -> SpecLike:
        """Return the spec of a part, bound to the parameter groups and the state if the spec needs them.

        Parameters
        ----------
        part : BucketPart
            Parameters of a bucket.
        scale : float
            Factor by which a GradScaler has multiplied all gradients; 1 without one.
        buffers : BucketBuffers
            Cached memory for the concatenated state.
        number : int
            Key of the part in `buffers`.

        Raises
        ------
        ArgumentError
            A parameter of the part is not in exactly one optimizer.
        SpecError
            There is no optimizer.
        """
        if not needs_optimizer(part.spec):
            return part.spec
        self.check_has(part.spec, part.names[0])
        self.check_each_once(dict(zip(part.parameters, part.names, strict=True)))
        place_of = {p: (o, i) for o in self.all for i, g in enumerate(o.param_groups) for p in g["params"]}
        groups: list[tuple[int, Any]] = []
        states: list[tuple[torch.nn.Parameter, dict[str, Any]]] = []
        offset = 0
        for p in part.parameters:
            optimizer, index = place_of[p]
            group = replace(optimizers.from_optimizer(optimizer, index, parameter=p), grad_scale=scale)
            if not groups or groups[-1][1] != group:
                groups.append((offset, group))
            states.append((p, optimizers.state_of(optimizer, p)))
            offset += n_values(p)
        known = [name for name in ("theta", "m", "v") if any(name in s for _, s in states)]
        state = {
            name: buffers.joined((number, name), [_flat_or_zeros(s.get(name), p) for p, s in states]) for name in known
        }
        assert isinstance(part.spec, Truncate)
        return part.spec.bind(groups, **state)


def _flat_or_zeros(x: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
    """Flatten the state tensor `x` of a parameter; return zeros for None, before the optimizer's first step."""
    return flat(torch.zeros_like(local(p)) if x is None else x, p)


def _some(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")


def check_join(module: torch.nn.Module | None) -> None:
    """Raise ArgumentError if join() makes a model divide gradients by another number than the ranks of the group."""
    if module is not None and divides_by_ranks_with_inputs(module):
        raise ArgumentError(
            "join(divide_by_initial_world_size=False) divides gradients by the number of ranks that have inputs left, "
            "but the hook divides by the number of all ranks: call join() without this argument"
        )
