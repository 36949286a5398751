"""Choice of a codec for a link, from measurements on the user's tensors on this machine."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import numpy as np

from codec._c.traits import is_lossless
from codec._options import CallOptions, settings_of
from codec.advisor.cost_model import (
    Algorithm,
    Cost,
    LinkModel,
    check_algorithm,
    compute_seconds,
    latency_seconds,
    link_of,
    predict_seconds,
    wire_nbytes,
)
from codec.advisor.model_rules import Kind, kinds_by_spec, kinds_of
from codec.advisor.sampling import Sample, bound_for, is_model, samples, tensors_of
from codec.arguments import MAX_RANKS, shown, whole
from codec.decoding import decode
from codec.encoding import bound, encode
from codec.errors import ArgumentError, SpecError
from codec.presets import resolve
from codec.reducing import reduce
from codec.specs import BoundSpec, Float8, Lossless, Quantize, Sign, Spec, Ternary, Truncate
from codec.tensors.view import Array
from codec.tensors.wrapper import view

CHUNK_NBYTES = 1 << 20  # bytes of a chunk; each rank sends its slice of a tensor in chunks
MAX_CHUNKS = 16
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of DistributedDataParallel's first and later buckets
RUNS = 3  # number of repetitions of a measurement, of which the shortest time counts


def named(spec: Spec | None) -> str:
    """Return a spec as a constructor call, without arguments that have their default value; "raw" for None."""
    if spec is None:
        return "raw"
    given = [f for f in fields(spec) if getattr(spec, f.name) != f.default]
    return f"{type(spec).__name__}({', '.join(f'{f.name}={getattr(spec, f.name)!r}' for f in given)})"


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """Prediction for one candidate.

    Attributes
    ----------
    spec : Spec or None
        Spec of the candidate; None: uncompressed tensors.
    seconds : float
        Seconds of the all-reduce.
    wire_seconds, compute_seconds : float
        Seconds for which each rank sends, and seconds for which it encodes, adds and decodes. Both overlap.
    latency_seconds : float
        Seconds of round trips, in which nothing is sent.
    nbytes : int
        Bytes that each rank sends; it receives as many.
    cost : Cost
        Costs measured on the sample, scaled to all values: the input of the model.
    """

    spec: Spec | None
    seconds: float
    wire_seconds: float
    compute_seconds: float
    latency_seconds: float
    nbytes: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class Advice:
    """Result of :func:`advise`. ``print(advice)`` shows a table.

    Attributes
    ----------
    spec : Spec or None
        Spec of the fastest candidate; None: send tensors uncompressed.
    seconds, raw_seconds : float
        Predicted seconds of the all-reduce with `spec`, and with uncompressed tensors.
    nbytes : int
        Bytes that each rank sends with `spec`; it receives as many.
    why : str
        Reason for the choice, in one or two sentences.
    table : tuple of AdviceRow
        Predictions for all candidates; the first one is for uncompressed tensors.
    link : LinkModel
        Link of each rank.
    world_size : int
        Number of ranks.
    tensor_nbytes : int
        Bytes of all tensors.
    algorithm : {"two_shot", "ring", "all_gather"}
        All-reduce algorithm for compressed tensors.
    feedback : bool
        True if lossy frames were measured with error feedback.
    """

    spec: Spec | None
    seconds: float
    raw_seconds: float
    nbytes: int
    why: str
    table: tuple[AdviceRow, ...]
    link: LinkModel
    world_size: int
    tensor_nbytes: int
    algorithm: Algorithm
    feedback: bool = False

    @property
    def hook(self) -> str | None:
        """Python statement that registers a DistributedDataParallel hook with `spec`; None if `spec` is None."""
        if self.spec is None:
            return None
        arguments = [f"codec.{self.spec!r}"]
        if isinstance(self.spec, Truncate) and self.spec.fixed_level is None:
            arguments.append("optimizer=optimizer")
        if not is_lossless(self.spec):
            arguments.append(f"feedback={self.feedback}")
        return f"hook = codec.torch.ddp_hook({', '.join(arguments)}).register(model)"

    def __str__(self) -> str:
        width = max(len(named(row.spec)) for row in self.table)
        lines = [
            f"{self.algorithm} all-reduce of {_mb(self.tensor_nbytes)}, {self.world_size} ranks, {self.link}",
            f"  {'':{width}}   frames   of sums     on the wire    compute  round trips      total   speedup",
        ]
        for row in self.table:
            lines.append(
                f"{'>' if row.spec == self.spec else ' '} {named(row.spec):{width}}"
                f" {row.cost.frame_nbytes / self.tensor_nbytes:8.1%} {row.cost.sum_nbytes / self.tensor_nbytes:9.1%}"
                f" {_ms(row.wire_seconds):>15} {_ms(row.compute_seconds):>10} {_ms(row.latency_seconds):>12}"
                f" {_ms(row.seconds):>10}"
                f" {_times(self.raw_seconds, row.seconds):>9}"
            )
        lines.append(self.why)
        if self.hook is not None:
            lines.append(f"For DistributedDataParallel: {self.hook}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types: specs become constructor calls; raw and infinite numbers become None."""

        def as_json(value: Any) -> Any:
            if isinstance(value, Spec):
                return named(value)
            if isinstance(value, tuple):
                return [as_json(each) for each in cast(tuple[Any, ...], value)]
            if isinstance(value, AdviceRow | Cost | LinkModel | Advice):
                return {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
            if value is None or isinstance(value, str | int):
                return value
            return float(value) if math.isfinite(value) else None

        return as_json(self)

    def to_json(self) -> str:
        """Return :meth:`to_dict` as JSON text."""
        import json  # imported here, so that `import codec` stays fast

        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


def advise(
    tensor_or_model: Any,
    link: Any,
    *,
    rtt: Any = None,
    world_size: int = 4,
    lossy: bool | Literal["near"] = False,
    feedback: bool = False,
    candidates: Any = None,
    optimizer: Any = None,
    options: CallOptions | None = None,
) -> Advice:
    """Measure candidate codecs on tensors, and choose the one with which an all-reduce is predicted to be fastest.

    Provisional: may change in any version.

    Each candidate encodes, adds and decodes the tensors. If the tensors are larger than 4 MiB, a sample of that size is
    measured instead: whole rows from 8 positions. The call takes about 0.1 s, or 0.3 s with all lossy candidates. A
    mean over ranks may compress worse than a gradient, because its mantissas have more nonzero bits; it is simulated by
    the mean of the sample and of shifted copies of the sample. Times are measured in this process, under the current
    load of the machine.

    For a model, tensors are encoded as by a hook with the default :class:`codec.torch.Policy`: small parameters are
    encoded lossless, and if the candidate is Ternary or Sign, embeddings are encoded with another spec. Without
    compression, DistributedDataParallel needs a round trip for each bucket; the hook sends all buckets of a step in the
    same round trips.

    The seconds of an all-reduce follow from the measured costs by a model that docs/reference/python.md describes. The
    advice is the candidate with the fewest seconds, or raw (no compression) if that is as fast.

    Parameters
    ----------
    tensor_or_model : array, tensor or View, sequence or mapping of them, or torch.nn.Module
        Gradients in host memory, float32, bfloat16 or float16, in the order of their bucket. For a module, the
        gradients of its parameters are measured. If it has no gradients yet, the parameters themselves are measured;
        their frames differ a little in size.
    link : str, number, or tuple of rate and round-trip time
        Link of each rank: ``"100mbit"``, ``"10Gbps"``, bits per second (also as text), or ``("10Gbps", "0.1ms")``.
    rtt : str or number, optional
        Round-trip time between two ranks, as ``ping`` measures it: seconds, or text such as ``"40ms"``. Default:
        that of `link` if it has one, otherwise 0.2 ms.
    world_size : int
        Number of ranks, 1 to 2^20.
    lossy : {False, "near", True}
        Loss that is allowed. False: none; :class:`Lossless` is the only candidate. "near": :class:`Truncate` is also a
        candidate, if `optimizer` is given. True: Float8, and Quantize with 8 and with 4 bits, are candidates, too.
    feedback : bool
        True: measure lossy frames with error feedback. If `lossy` is also True, Ternary and Sign are candidates, too.
    candidates : iterable of Spec, bound spec or name of a preset; optional
        Candidates that replace those chosen by `lossy` and `feedback`. The state arrays of a bound spec are those of
        all tensors, concatenated.
    optimizer : torch.optim.Optimizer, optional
        Optimizer that will apply the gradients, for Truncate. The tensors must be gradients of its parameters.
    options : CallOptions, optional
        Engine and number of threads, made by :func:`options`; and the algorithm of compressed tensors, "two_shot",
        "ring" or "all_gather". Default: all_gather between two ranks, two_shot between more. Uncompressed tensors are
        predicted with two_shot, which sends as many bytes as a ring.

    Returns
    -------
    Advice
        The fastest spec, and the predictions for all candidates.

    Raises
    ------
    ArgumentError, SpecError
        The tensors have no values, a dtype that cannot be reduced, or NaN or Inf that a lossy candidate refuses; an
        argument has another type or is out of range; or Truncate is a candidate and there is no optimizer.
    EngineError
        A tensor is not in host memory.

    Examples
    --------
    >>> grad = np.random.default_rng(0).standard_normal((500, 1000)).astype(np.float32)
    >>> codec.advise(grad, "1mbit").spec
    Lossless(max_code_length=8, model='auto')
    >>> codec.advise(grad, "1mbit", lossy=True).spec
    Quantize(bits=4, group_size=64, levels='even', rounding='stochastic', seed=0, zero_point=False)
    >>> codec.advise(grad, float("inf")).spec is None
    True
    """
    link = link_of(link, rtt)
    world_size = whole("world_size", world_size, 1, MAX_RANKS)
    options = settings_of(options)
    algorithm = _algorithm_of(options, world_size)
    specs = _specs(candidates, lossy, feedback, optimizer)
    tensors, weights = tensors_of(tensor_or_model, optimizer)
    nbytes = sum(t.v.nbytes for t in tensors)
    chunks = max(1, min(MAX_CHUNKS, nbytes // world_size // CHUNK_NBYTES))
    model = tensor_or_model if is_model(tensor_or_model) else None
    kinds: list[Kind] = [None] * len(tensors) if model is None else kinds_of(tensors, model)

    @functools.cache
    def taken(some: frozenset[Kind]) -> list[Sample]:
        return samples([t for t, kind in zip(tensors, kinds, strict=True) if kind in some], world_size, optimizer)

    def row(spec: Spec | None, cost: Cost, way: Algorithm, waiting: float) -> AdviceRow:
        sent = wire_nbytes(cost, world_size, way)
        seconds = predict_seconds(cost, replace(link, rtt=0.0), world_size, algorithm=way, chunks=chunks) + waiting
        return AdviceRow(
            spec,
            seconds,
            wire_seconds=8 * sent / link.bits_per_second,
            compute_seconds=compute_seconds(cost, world_size, way),
            latency_seconds=waiting,
            nbytes=round(sent),
            cost=cost,
        )

    buckets = 1 + max(0, -(-(nbytes - FIRST_BUCKET) // BUCKET)) if model is not None else 1
    raw = row(None, Cost(nbytes, nbytes), "two_shot", buckets * link.rtt if world_size > 1 else 0.0)
    waiting, table = latency_seconds(link, world_size, algorithm), [raw]
    for spec, given in specs:
        by_spec = kinds_by_spec(kinds, spec)
        costs = [
            measure(s, its, given, feedback, options) * (s.n / s.x.size)
            for its, some in by_spec.items()
            for s in taken(some)
        ]
        table.append(row(spec, sum(costs[1:], costs[0]), algorithm, waiting))
    best = min(table, key=lambda r: r.seconds)  # of equal times the first row wins, so raw is preferred
    why = _why(best, table, world_size)
    if weights:
        why += " Measured on weights: call advise() again once the model has gradients."
    found = best.spec, best.seconds, raw.seconds, best.nbytes
    return Advice(*found, why, tuple(table), link, world_size, nbytes, algorithm, feedback)


def _algorithm_of(options: CallOptions, world_size: int) -> Algorithm:
    """Return the algorithm for compressed tensors: the option ``algorithm``, or the choice for "auto"."""
    if options.algorithm in (None, "auto"):
        return "all_gather" if world_size == 2 else "two_shot"
    return check_algorithm(options.algorithm)


def _specs(candidates: Any, lossy: Any, feedback: Any, optimizer: Any) -> list[tuple[Spec, BoundSpec | None]]:
    """Return the candidates, each with the user's bound spec, or None if it is not bound."""
    if lossy is not True and lossy is not False and not (isinstance(lossy, str) and lossy == "near"):
        raise ArgumentError(f'lossy must be False, "near" or True, got {shown(lossy)}')
    if feedback is not True and feedback is not False:
        raise ArgumentError(f"feedback must be True or False, got {shown(feedback)}")
    if candidates is not None:
        if isinstance(candidates, str) or not hasattr(candidates, "__iter__"):
            raise ArgumentError(f"candidates must be a list of specs, got {shown(candidates)}")
        resolved = [resolve(spec) for spec in candidates]
        for spec, bound_spec in resolved:
            if isinstance(spec, Truncate) and spec.fixed_level is None and bound_spec is None and optimizer is None:
                raise SpecError(
                    f"the candidate {named(spec)} needs an optimizer: pass optimizer=, or bind the spec to one by "
                    "bind()"
                )
        return resolved
    specs: list[Spec] = [Lossless()]
    if lossy and optimizer is not None:
        specs += [Truncate(guard="exact"), Truncate()]
    if lossy is True:
        specs += [Float8(), Quantize(8), Quantize(4)]
        if feedback:
            specs += [Ternary("base3"), Sign(group_size=1024)]
    return [(spec, None) for spec in specs]


def measure(s: Sample, spec: Spec, given: BoundSpec | None, feedback: bool, options: CallOptions) -> Cost:
    """Measure the costs of a sample with one spec. `given`: the bound spec that the user passed, or None."""
    out = np.empty(bound(s.x.shape, s.dtype, spec), np.uint8)
    bound_spec = bound_for(spec, given, s) if isinstance(spec, Truncate) and spec.fixed_level is None else None
    residual = np.zeros(s.x.shape, np.float32) if feedback and not is_lossless(spec) else None
    once = options if residual is None else replace(options, verify_first=False)

    def encoded(x: Array) -> Any:
        values = view(x, s.dtype, s.segments)
        how: Any = {"residual": residual, "feedback": residual is not None, "options": once}
        return encode(values, spec if bound_spec is None else bound_spec, out=out, **how)

    encode_sum, frame = _shortest(lambda: encoded(s.mean))
    sum_nbytes = len(frame)
    seconds, frame = _shortest(lambda: encoded(s.x))
    back, total = np.empty_like(s.x), np.empty(s.x.shape, np.float32)
    decoding, _ = _shortest(lambda: decode(frame, bound_spec, out=back, options=options))
    adding, _ = _shortest(lambda: reduce([frame, frame], bound_spec, out=total, options=options))
    return Cost(len(frame), sum_nbytes, seconds, encode_sum, adding / 2, decoding)


def _shortest(f: Callable[[], Any]) -> tuple[float, Any]:
    """Call `f` RUNS times; return the shortest time in seconds, and the last result."""
    seconds, result = float("inf"), None
    for _ in range(RUNS):
        start = time.perf_counter()
        result = f()
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, result


def _why(best: AdviceRow, table: list[AdviceRow], world_size: int) -> str:
    """Return a text that gives the reason for the choice of `best`."""
    raw, others = table[0], table[1:]
    if world_size == 1:
        return "A single rank sends nothing."
    if best.spec is not None:
        return (
            f"{named(best.spec)} sends {best.nbytes / raw.nbytes:.1%} of raw's bytes: {_ms(best.wire_seconds)} on the "
            f"wire instead of {_ms(raw.wire_seconds)}, beside {_ms(best.compute_seconds)} of encoding, adding and "
            f"decoding."
        )
    smaller = [row for row in others if row.nbytes < raw.nbytes]
    if not smaller:
        return "Raw: no frame is smaller than the tensors themselves."
    rival = min(smaller, key=lambda r: r.seconds)
    more = rival.latency_seconds - raw.latency_seconds
    waiting = f", and its round trips {_ms(more)} more" if more > 0 else ""
    return (
        f"Raw: {named(rival.spec)} would save {_ms(raw.wire_seconds - rival.wire_seconds)} on the wire, but encoding, "
        f"adding and decoding take {_ms(rival.compute_seconds)}{waiting}."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"


def _times(slow: float, fast: float) -> str:
    return f"{slow / fast:.2g}x" if fast else "1x"
