"""Choice of a codec for a link, from measurements on the user's tensors on this machine."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from codec._c.traits import is_lossless
from codec._options import CallOptions, settings_of
from codec.advisor.advice import Advice, AdviceRow, ms, named
from codec.advisor.cost_model import Algorithm, Cost, check_algorithm, link_of
from codec.advisor.levels import MachineRanks, Predicted, in_one_level, in_two_levels, plain_seconds, ranks_of
from codec.advisor.model_rules import Kind, kinds_by_spec, kinds_of
from codec.advisor.sampling import Sample, bound_for, is_model, samples, tensors_of
from codec.arguments import shown
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


def advise(
    tensor_or_model: Any,
    link: Any,
    *,
    rtt: Any = None,
    world_size: int | tuple[int, int] = 4,
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
        Link of each rank, or of each machine: ``"100mbit"``, ``"10Gbps"``, bits per second (also as text), or
        ``("10Gbps", "0.1ms")``.
    rtt : str or number, optional
        Round-trip time between two ranks, as ``ping`` measures it: seconds, or text such as ``"40ms"``. Default:
        that of `link` if it has one, otherwise 0.2 ms.
    world_size : int or tuple of int
        Number of ranks, 1 to 2^20; or numbers of machines and of ranks on each of them, such as ``(2, 8)``. The ranks
        of a machine share its `link`. Each candidate is then predicted in one level and in two (``group=`` a mesh:
        plain sums within machines, whose cost is measured, and frames between them), and the faster one counts.
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
    ranks = ranks_of(world_size)
    options = settings_of(options)
    flat, algorithm = _algorithm_of(options, ranks.size), _algorithm_of(options, ranks.machines)
    specs = _specs(candidates, lossy, feedback, optimizer)
    tensors, weights = tensors_of(tensor_or_model, optimizer)
    nbytes = sum(t.v.nbytes for t in tensors)
    chunks = max(1, min(MAX_CHUNKS, nbytes // ranks.size // CHUNK_NBYTES))
    model = tensor_or_model if is_model(tensor_or_model) else None
    kinds: list[Kind] = [None] * len(tensors) if model is None else kinds_of(tensors, model)

    @functools.cache
    def taken(some: frozenset[Kind]) -> list[Sample]:
        return samples([t for t, kind in zip(tensors, kinds, strict=True) if kind in some], ranks.size, optimizer)

    buckets = 1 + max(0, -(-(nbytes - FIRST_BUCKET) // BUCKET)) if model is not None else 1
    # Uncompressed tensors are reduced by a ring, whose bytes cross each link once, and which waits once a bucket.
    ring = in_one_level(Cost(nbytes, nbytes), replace(link, rtt=0.0), MachineRanks(ranks.size), "two_shot", chunks)
    waiting = buckets * link.rtt if ranks.size > 1 else 0.0
    raw = _row(None, Cost(nbytes, nbytes), [replace(ring, seconds=ring.seconds + waiting, latency_seconds=waiting)])
    table, within = [raw], plain_seconds(nbytes, ranks)
    for spec, given in specs:
        by_spec = kinds_by_spec(kinds, spec)
        costs = [
            measure(s, its, given, feedback, options) * (s.n / s.x.size)
            for its, some in by_spec.items()
            for s in taken(some)
        ]
        cost = sum(costs[1:], costs[0])
        predicted = [in_one_level(cost, link, ranks, flat, chunks)]
        if ranks.each > 1:
            predicted.append(in_two_levels(cost, link, ranks, algorithm, chunks, within))
        table.append(_row(spec, cost, predicted))
    best = min(table, key=lambda r: r.seconds)  # of equal times the first row wins, so raw is preferred
    why = _why(best, table, ranks.size)
    if weights:
        why += " Measured on weights: call advise() again once the model has gradients."
    found = best.spec, best.seconds, raw.seconds, best.nbytes
    return Advice(*found, why, tuple(table), link, ranks.size, nbytes, algorithm, feedback, ranks.each)


def _row(spec: Spec | None, cost: Cost, predicted: list[Predicted]) -> AdviceRow:
    """Return the row of a candidate that was predicted in one level, and perhaps in two; the faster one counts."""
    best = min(predicted, key=lambda each: each.seconds)  # of equal times one level wins
    several = predicted if len(predicted) > 1 else []
    return AdviceRow(
        spec,
        best.seconds,
        best.wire_seconds,
        best.compute_seconds,
        best.latency_seconds,
        round(best.nbytes),
        cost,
        1 + predicted.index(best),
        tuple(each.seconds for each in several),
        tuple(round(each.nbytes) for each in several),
    )


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
            f"{named(best.spec)} sends {best.nbytes / raw.nbytes:.1%} of raw's bytes: {ms(best.wire_seconds)} on the "
            f"wire instead of {ms(raw.wire_seconds)}, beside {ms(best.compute_seconds)} of encoding, adding and "
            f"decoding."
        )
    smaller = [row for row in others if row.nbytes < raw.nbytes]
    if not smaller:
        return "Raw: no frame is smaller than the tensors themselves."
    rival = min(smaller, key=lambda r: r.seconds)
    more = rival.latency_seconds - raw.latency_seconds
    waiting = f", and its round trips {ms(more)} more" if more > 0 else ""
    return (
        f"Raw: {named(rival.spec)} would save {ms(raw.wire_seconds - rival.wire_seconds)} on the wire, but encoding, "
        f"adding and decoding take {ms(rival.compute_seconds)}{waiting}."
    )
