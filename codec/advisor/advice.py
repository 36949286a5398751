"""Result of codec.advise, as a table and as JSON."""

import math
from dataclasses import dataclass, fields
from typing import Any, cast

from codec._c.traits import is_lossless
from codec.advisor.cost_model import Algorithm, Cost, LinkModel
from codec.advisor.levels import MachineRanks
from codec.specs import Spec, Truncate


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
        Bytes that each rank (or machine, if several ranks share one) sends; it receives as many.
    cost : Cost
        Costs measured on the sample, scaled to all values: the input of the model.
    levels : int
        Number of levels for which the other attributes are predicted, the faster one: 1, or 2 for plain sums within
        machines and frames between them.
    seconds_by_levels : tuple of float
        Seconds in one level and in two levels; empty if each machine has one rank, and for uncompressed tensors.
    nbytes_by_levels : tuple of int
        Bytes that a machine sends in one level and in two levels.
    """

    spec: Spec | None
    seconds: float
    wire_seconds: float
    compute_seconds: float
    latency_seconds: float
    nbytes: int
    cost: Cost
    levels: int = 1
    seconds_by_levels: tuple[float, ...] = ()
    nbytes_by_levels: tuple[int, ...] = ()


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
        Bytes that each rank (or machine, if several ranks share one) sends with `spec`; it receives as many.
    why : str
        Reason for the choice, in one or two sentences.
    table : tuple of AdviceRow
        Predictions for all candidates; the first one is for uncompressed tensors.
    link : LinkModel
        Link of each rank, or of each machine if several ranks share one.
    world_size : int
        Number of ranks.
    tensor_nbytes : int
        Bytes of all tensors.
    algorithm : {"two_shot", "ring", "all_gather"}
        All-reduce algorithm for compressed tensors.
    feedback : bool
        True if lossy frames were measured with error feedback.
    ranks_per_machine : int
        Number of ranks that share a machine's link.
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
    ranks_per_machine: int = 1

    @property
    def row(self) -> AdviceRow:
        """Prediction for `spec`."""
        return next(row for row in self.table if row.spec == self.spec)

    @property
    def mesh(self) -> str | None:
        """Python statement that creates the mesh of :attr:`hook`; None if one level is at least as fast as two."""
        if self.row.levels == 1:
            return None
        shape = self.world_size // self.ranks_per_machine, self.ranks_per_machine
        return f'mesh = torch.distributed.init_device_mesh("cpu", {shape})'

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
        levels = "" if self.mesh is None else ", group=mesh"
        return f"hook = codec.torch.ddp_hook({', '.join(arguments)}).register(model{levels})"

    def __str__(self) -> str:
        width = max(len(named(row.spec)) for row in self.table)
        lines = [
            f"{self.algorithm} all-reduce of {_mb(self.tensor_nbytes)}, {self._ranks}, {self.link}",
            f"  {'':{width}}   frames   of sums     on the wire    compute  round trips      total   speedup",
        ]
        for row in self.table:
            lines.append(
                f"{'>' if row.spec == self.spec else ' '} {named(row.spec):{width}}"
                f" {row.cost.frame_nbytes / self.tensor_nbytes:8.1%} {row.cost.sum_nbytes / self.tensor_nbytes:9.1%}"
                f" {ms(row.wire_seconds):>15} {ms(row.compute_seconds):>10} {ms(row.latency_seconds):>12}"
                f" {ms(row.seconds):>10}"
                f" {_times(self.raw_seconds, row.seconds):>9}"
            )
        lines.append(self.why)
        if self.row.seconds_by_levels:
            one, two = (
                f"{ms(seconds)} and {_mb(nbytes)} from each machine"
                for seconds, nbytes in zip(self.row.seconds_by_levels, self.row.nbytes_by_levels, strict=True)
            )
            lines.append(f"In two levels: {two}; in one level: {one}.")
        if self.hook is not None:
            before = "" if self.mesh is None else f"{self.mesh}; "
            lines.append(f"For DistributedDataParallel: {before}{self.hook}")
        return "\n".join(lines)

    @property
    def _ranks(self) -> MachineRanks:
        return MachineRanks(self.world_size // self.ranks_per_machine, self.ranks_per_machine)

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


def ms(seconds: float) -> str:
    """Return a duration as text, in milliseconds or seconds."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"


def _times(slow: float, fast: float) -> str:
    return f"{slow / fast:.2g}x" if fast else "1x"
