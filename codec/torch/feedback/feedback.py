"""Error feedback of all-reduces and reduce-scatters: residuals by parameter name, for a caller that keeps them."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from codec import ArgumentError, PeerError, StateError
from codec.arguments import decay_of
from codec.specs import Preset, Spec, check_contraction
from codec.stateful.ranges import Layout
from codec.torch.feedback import checkpoint
from codec.torch.feedback.checkpoint import UNKNOWN
from codec.torch.feedback.pair import ResidualPair, owned_values
from codec.torch.network.waits import Turns
from codec.torch.reduction.arguments import plain_spec
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.table import Algorithm
from codec.torch.transport.channel import Channel


@dataclass(frozen=True, eq=False)
class Change:
    """Residuals that a collective in flight writes: made by :meth:`Feedback.begin`, kept by :meth:`Feedback.commit`."""

    pair: ResidualPair
    layout: Layout
    owned: tuple[int, int]  # begin and end of the values whose sums this rank encodes
    op: str
    channel: Channel

    @property
    def is_over(self) -> bool:
        """True if the collective was cancelled, so that its residuals will never be kept."""
        return self.channel.cancelled


class Feedback:
    """Error feedback for :func:`all_reduce` and :func:`reduce_scatter`: residuals of this rank, by parameter.

    Each rank sends its values plus the errors of its earlier frames, and keeps the errors of the new ones. A rank that
    encodes sums, as in a two-shot all-reduce, does the same with the sums of its slice. Results then add up to the
    exact sums, except for the residuals. Residuals change only if the collective succeeds on all ranks. They take 4
    bytes for each value, 4 more for each value of this rank's slice, and the same again for the copies that a
    collective in flight changes.

    Residuals belong to parameter names and ranges, not to buckets. Name the parameters of a bucket, and different
    tensors, by ``codec.view(tensor, segments={name: shape, ...})``. A tensor without names is one parameter of its own,
    so a Feedback can serve only one such tensor.

    Parameters
    ----------
    spec : Spec or str
        Codec of calls without a spec, or the name of a preset. It must be a contraction
        (:attr:`codec.Spec.contraction`).
    decay : float
        Factor of a residual each time it is added, above 0 and at most 1, as of :class:`codec.ErrorFeedback`.

    Attributes
    ----------
    spec : Spec
        Codec of calls without a spec.
    decay : float
        Factor of residuals.

    Raises
    ------
    SpecError
        The spec is lossless or not a contraction.
    ArgumentError
        The spec is bound to an optimizer, which is for one call: pass the bound spec to the call. Or `decay` is out of
        range.

    Examples
    --------
    >>> feedback = codec.torch.Feedback(codec.Sign())
    >>> exact = torch.linspace(-1, 1, 1000)
    >>> total = torch.zeros(1000)
    >>> for step in range(100):
    ...     gradient = exact.clone()
    ...     codec.torch.all_reduce(gradient, op="mean", feedback=feedback)
    ...     total += gradient
    >>> bool((total / 100 - exact).abs().mean() < 0.05)
    True

    Residuals of a bucket are kept by name, and saved with a checkpoint:

    >>> bucket = codec.view(torch.ones(110), segments={"weight": (10, 10), "bias": (10,)})
    >>> feedback = codec.torch.Feedback(codec.Quantize(4))
    >>> codec.torch.all_reduce(bucket, feedback=feedback)
    >>> state = feedback.state_dict()
    >>> sorted(state["worker"])
    ['bias[0:10]', 'role', 'version', 'weight[0:100]']
    >>> feedback.load_state_dict(state)
    """

    def __init__(self, spec: Spec | Preset, *, decay: float = 1.0) -> None:
        self.spec, self.decay = plain_spec(spec), decay_of(decay)
        check_contraction(self.spec)
        self._pair = ResidualPair(self.spec, self.decay)
        self._owner = UNKNOWN, UNKNOWN  # rank and number of ranks of the residuals
        self._op = ""  # operation of the reductions; "" before the first one
        self._sizes: dict[str, int] = {}  # values of each parameter that has a residual
        self._owned: dict[str, Any] = {}  # by parameter: layout, begin and end of the last reduction that had it
        self._change: Change | None = None  # change made by the collective in flight
        self._lock = threading.Lock()  # collectives run in threads of their groups
        self._turns: WeakKeyDictionary[Channel, Turns] = WeakKeyDictionary()  # order of the collectives of each group

    def __repr__(self) -> str:
        return f"<codec.torch.Feedback {self.spec}, {len(self._sizes)} parameters>"

    def norms(self) -> dict[str, float]:
        """Return the Euclidean norm of this rank's residual of each parameter; "" is a tensor without names."""
        with self._lock:
            return self._pair.norms()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's residuals; those of a collective in flight as before that collective.

        Returns
        -------
        dict
            Integers, strings, and two dicts of float32 tensors, which ``torch.load(weights_only=True)`` accepts.
        """
        with self._lock:
            rank, world_size = self._owner
            return checkpoint.head(rank, world_size, self._op) | self._pair.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the residuals by those of a state of this rank, which is copied.

        Parameters
        ----------
        state : mapping
            Return value of :meth:`state_dict` on this rank, or this rank's item of that of :meth:`reshard`.

        Raises
        ------
        StateError
            `state` is no such state, or a collective is in flight. Residuals are unchanged. If the state is of another
            rank or number of ranks, the next collective raises this error.
        """
        rank, world_size, op, parts = checkpoint.parse(state)
        pair = ResidualPair(self.spec, self.decay)
        pair.load_state_dict(parts)
        with self._lock:
            if self._change is not None and not self._change.is_over:
                raise StateError("a collective in flight uses these residuals: wait for it before a state is loaded")
            self._pair, self._owner, self._op, self._change = pair, (rank, world_size), op, None
            self._sizes, self._owned = {}, {}
            for name, _, stop in pair.ranges():
                self._sizes[name] = max(stop, self._sizes.get(name, 0))

    @staticmethod
    def reshard(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
        """Return states for another number of ranks, whose residuals correct results by as much as the given ones.

        Every new rank gets the mean of the workers' residuals if the collectives are means, and an equal share of their
        sum if they are sums. Residuals of encoded sums move to other ranks unchanged.

        Parameters
        ----------
        states : sequence of dict
            State of each old rank, in their order.
        world_size : int
            Number of new ranks.

        Returns
        -------
        list of dict
            State of each new rank, for :meth:`load_state_dict`.

        Raises
        ------
        StateError
            `states` are not those of all ranks of one Feedback.
        ArgumentError
            `world_size` is not a number from 1 to 2^20.

        Examples
        --------
        >>> feedback = codec.torch.Feedback(codec.Sign())
        >>> codec.torch.all_reduce(torch.ones(100), op="mean", feedback=feedback)
        >>> [s["rank"] for s in codec.torch.Feedback.reshard([feedback.state_dict()], 3)]
        [0, 1, 2]
        """
        return checkpoint.reshard(states, world_size)

    # For collectives, in the threads of their groups

    def turns(self, channel: Channel) -> Turns:
        """Return the turns of the collectives of a group: each begins when the one before has ended."""
        return self._turns.setdefault(channel, Turns())

    def begin(self, r: Reduction, layout: Layout, channel: Channel, algorithm: Algorithm) -> Change:
        """Make the frames of a collective's reduction add the residuals; for implementations of collectives.

        Parameters
        ----------
        r : Reduction
            Reduction of the collective.
        layout : Layout
            Ranges of parameters that are the values of `r`.
        channel : Channel
            Channel of the group.
        algorithm : Algorithm
            Algorithm of the reduction.

        Returns
        -------
        Change
            New residuals: pass them to :meth:`commit` or :meth:`drop` when the collective has ended.

        Raises
        ------
        ArgumentError, SpecError, StateError
            The residuals cannot be used for this reduction, or another collective is in flight. They are unchanged.
        """
        check_contraction(r.spec)
        if r.op == "max":
            raise ArgumentError("error feedback is for sums and means; op is a maximum")
        owned = owned_values(r, algorithm, channel.rank, channel.size)
        with self._lock:
            if self._change is not None and not self._change.is_over:
                raise StateError("a collective of another group uses this Feedback: wait for it first")
            self._check(r.op, layout, (channel.rank, channel.size))
            moved = any(self._owned.get(name) != (layout, owned) for name, _, _ in layout)
            pair = self._pair.forked()
            pair.feed(r, layout, owned, channel.size, moved=moved)
            self._change = Change(pair, layout, owned, r.op, channel)
            return self._change

    def commit(self, change: Change) -> None:
        """Keep the residuals of a collective that has succeeded on all ranks.

        Raises
        ------
        PeerError
            The collective was cancelled. The residuals are unchanged.
        """
        with self._lock:
            if self._change is not change:
                raise PeerError("the collective was cancelled: make a new group")
            change.pair.commit()
            self._pair, self._change = change.pair, None
            self._owner, self._op = (change.channel.rank, change.channel.size), change.op
            self._owned |= dict.fromkeys((name for name, _, _ in change.layout), (change.layout, change.owned))
            self._sizes |= {name: stop for name, _, stop in change.layout}

    def drop(self, change: Change) -> None:
        """Drop the residuals of a collective that has failed; do nothing if they were committed."""
        with self._lock:
            if self._change is change:
                self._change = None

    def _check(self, op: str, layout: Layout, here: tuple[int, int]) -> None:
        """Raise ArgumentError or StateError if the residuals are of other reductions than this one."""
        if not self._sizes:
            return
        if UNKNOWN not in self._owner and self._owner != here:
            rank, size = self._owner
            raise StateError(
                f"these residuals belong to rank {rank} of {size}, and this is rank {here[0]} of {here[1]}: load this "
                "rank's own state, or one that Feedback.reshard(states, world_size) made for this number of ranks"
            )
        if self._op not in ("", op):
            raise ArgumentError(
                f"this Feedback holds residuals of a {self._op}, and op is a {op}: use another Feedback"
            )
        for name, _, n in layout:
            if self._sizes.get(name, n) != n:
                what = f"parameter {name!r}" if name else "the tensor"
                raise ArgumentError(
                    f"{what} has {n} values, but its residual has {self._sizes[name]}: give different tensors "
                    "different names, codec.view(tensor, segments={name: shape})"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return the residuals and the spec for pickle and copy."""
        return {"spec": self.spec, "decay": self.decay, "state": self.state_dict()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` returned."""
        self.__init__(saved["spec"], decay=saved["decay"])
        self.load_state_dict(saved["state"])
