"""Table of algorithms, with their functions and properties."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from codec import ArgumentError
from codec._options import check_algorithm
from codec.specs import Spec
from codec.torch.reduction import algorithms, algorithms_device, raw, shared_scale
from codec.torch.reduction.host import Reduction, Values
from codec.torch.transport.collective import CollectivePart


def _accept(spec: Spec, op: str) -> None:
    """Accept any spec and operation."""


Run = Callable[[CollectivePart, Any], Awaitable[Values]]


@dataclass(frozen=True)
class Algorithm:
    """Algorithm of a collective.

    Parameters
    ----------
    name : str
        Name in signatures (protocol.md, section 5.1). For an all-reduce it is also a value of ``algorithm=``.
    run : callable
        Coroutine function run(part, reduction) that exchanges values and returns the result.
    on_device : Algorithm, optional
        Variant whose frames stay on GPUs.
    encodes_sums : bool
        True: a rank encodes the sums of its slice, so that these have a separate residual.
    feedback : bool
        True: error feedback is possible.
    defers : bool
        True: the algorithm supports deferred decoding (:attr:`Reduction.deferred`).
    raw_fallback : bool
        True: "auto" may send tensors uncompressed instead, if that is measured to be faster.
    joins : bool
        True: concurrent reductions on GPUs combine their engine calls (:class:`Joint`).
    uncompressed : bool
        True: values are sent uncompressed.
    check : callable
        Function check(spec, op) that raises SpecError or ArgumentError if the algorithm does not support them.
    """

    name: str
    run: Run
    on_device: "Algorithm | None" = None
    encodes_sums: bool = False
    feedback: bool = True
    defers: bool = False
    raw_fallback: bool = False
    joins: bool = False
    uncompressed: bool = False
    check: Callable[[Spec, str], None] = _accept


def _with_device(algorithm: Algorithm, run: Run) -> Algorithm:
    """Return an algorithm that runs `run` for values on GPUs, and has a variant whose frames stay there."""
    name, on_host = f"{algorithm.name} on GPUs", algorithm.run
    variant = replace(algorithm, name=name, run=run, defers=False, joins=True)

    def run_where_values_lie(part: CollectivePart, r: Reduction) -> Awaitable[Values]:
        return (run if r.on_device else on_host)(part, r)

    return replace(algorithm, run=run_where_values_lie, on_device=variant, joins=True)


async def _on_host(
    run: Callable[[CollectivePart, Reduction], Awaitable[Values]], part: CollectivePart, r: Reduction
) -> Values:
    """Run an algorithm that needs values in host memory."""
    return r.from_host(await run(part, r.on_host()))


TWO_SHOT = _with_device(
    Algorithm(
        "two_shot",
        algorithms.two_shot,
        encodes_sums=True,
        defers=True,
        raw_fallback=True,
    ),
    algorithms_device.two_shot,
)
ALL_GATHER = _with_device(
    Algorithm("all_gather", algorithms.all_gather, defers=True, raw_fallback=True),
    algorithms_device.all_gather,
)
RING = Algorithm("ring", partial(_on_host, algorithms.ring), feedback=False, defers=True)
RAW = Algorithm("raw", partial(_on_host, raw.two_shot), encodes_sums=True, uncompressed=True)
# NCCL's all-reduce, which "auto" uses for uncompressed values if all ranks have GPUs. RAW adds in rank order instead.
PLAIN = Algorithm("plain on GPUs", algorithms_device.plain, encodes_sums=True, uncompressed=True)
# Means of LocalSteps with TopK. "algorithm=" cannot name it, since its results are not those of a mean.
SENDERS = Algorithm("senders", partial(_on_host, algorithms.senders))
SHARED_SCALE = Algorithm("shared_scale", partial(_on_host, shared_scale.shared_scale), check=shared_scale.check)

# Algorithms by the value of ``algorithm=``. "auto" is not in the table: it chooses among these.
ALL_REDUCES = {each.name: each for each in (TWO_SHOT, ALL_GATHER, RING, RAW, SHARED_SCALE)}

REDUCE_SCATTER = _with_device(Algorithm("reduce_scatter", algorithms.reduce_scatter), algorithms_device.reduce_scatter)
GATHER = _with_device(Algorithm("gather", algorithms.gather), algorithms_device.gather)
ALL_TO_ALL = _with_device(Algorithm("all_to_all", algorithms.all_to_all), algorithms_device.all_to_all)


def check_request(requested: Any, spec: Spec, op: str, *, feedback: bool) -> None:
    """Check that the value of ``algorithm=`` can be combined with the other arguments of an all-reduce or a hook.

    Raises
    ------
    ArgumentError, SpecError
        The algorithm is unknown, or does not support the spec, the operation or error feedback.
    """
    algorithm = ALL_REDUCES.get(check_algorithm(requested))
    if algorithm is None:
        return
    algorithm.check(spec, op)
    if feedback and not algorithm.feedback:
        raise ArgumentError(
            f'algorithm="{algorithm.name}" has no error feedback, because its frames hold sums of other ranks\' '
            'values: use "two_shot" or "all_gather"'
        )
