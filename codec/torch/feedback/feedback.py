"""Error feedback of all-reduces and reduce-scatters: an object of the caller that holds residuals by parameter name."""

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
from codec.torch.feedback.checkpoint import UNKNOWN, ResidualOwner
from codec.torch.feedback.pair import ResidualPair, owned_values
from codec.torch.network.waits import Turns
from codec.torch.reduction.arguments import plain_spec
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.raw import window_of
from codec.torch.reduction.table import Algorithm
from codec.torch.transport.channel import Channel
from codec.torch.transport.levels import Levels


@dataclass(eq=False)
class ResidualChange:
    """New residuals of a collective in flight: :meth:`Feedback.begin` creates, :meth:`Feedback.commit` stores them."""

    pair: ResidualPair
    layout: Layout  # parameters of the whole tensor
    op: str
    channel: Channel
    levels: Levels
    # layout of the values that this rank encodes; begin and end of the part whose sums this rank encodes
    owned: tuple[Layout, tuple[int, int]] = (), (0, 0)

    @property
    def is_over(self) -> bool:
        """True if the collective was cancelled, so that its residuals will never be committed."""
        return self.channel.cancelled


class Feedback:
    """Error feedback for :func:`all_reduce` and :func:`reduce_scatter`: residuals of this rank, by parameter.

    Each rank adds the encoding errors of its last frames, the residuals, to the values that it sends, and stores the
    errors of the new frames. A rank that encodes sums, as in a two-shot all-reduce, does the same with the sums of its
    slice. Over many collectives, the results then add up to the exact sums, up to the current residuals. Residuals
    change only if the collective succeeds on all ranks. They take 4 bytes per value, 4 more per value of this rank's
    slice, and as much again for the copies that a collective in flight changes. In two levels, a rank has residuals
    only of the part that it reduces with other machines.

    Residuals belong to parameter names and ranges, not to buckets. Name the parameters of a bucket by
    ``codec.view(tensor, segments={name: shape, ...})``, and give different tensors different names. A tensor without
    names counts as one parameter named "", so a Feedback can serve only one such tensor.

    Parameters
    ----------
    spec : Spec or str
        Codec of collectives that are called without a spec, or the name of a preset. It must be a contraction
        (:attr:`codec.Spec.contraction`).
    decay : float
        Factor by which a residual is multiplied each time before it is added, above 0 and at most 1, as for
        :class:`codec.ErrorFeedback`.

    Attributes
    ----------
    spec : Spec
        Codec of collectives that are called without a spec.
    decay : float
        Factor by which a residual is multiplied each time before it is added.

    Raises
    ------
    SpecError
        The spec is lossless or not a contraction.
    ArgumentError
        The spec is bound to the state of an optimizer, which is valid for a single collective: pass such a spec to the
        collective. Or `decay` is out of range.

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

    Store the residuals of a bucket by parameter name, and save them with a checkpoint:

    >>> bucket = codec.view(torch.ones(110), segments={"weight": (10, 10), "bias": (10,)})
    >>> feedback = codec.torch.Feedback(codec.Quantize(4))
    >>> codec.torch.all_reduce(bucket, feedback=feedback)
    >>> state = feedback.state_dict()
    >>> sorted(state["worker"])
    ['bias[0:10]', 'format', 'role', 'version', 'weight[0:100]']
    >>> feedback.load_state_dict(state)
    """

    def __init__(self, spec: Spec | Preset, *, decay: float = 1.0) -> None:
        self.spec, self.decay = plain_spec(spec), decay_of(decay)
        check_contraction(self.spec)
        self._pair = ResidualPair(self.spec, self.decay)
        self._owner = ResidualOwner()  # rank, number of ranks, and ranks of a machine, of the residuals
        self._op = ""  # op of the reductions, "mean" or "sum"; "" before the first one
        self._sizes: dict[str, int] = {}  # number of values of each parameter that has a residual
        # Parameters whose number in `_sizes` is a lower bound: this rank's residuals may end with its window.
        self._open: set[str] = set()
        # By parameter: `ResidualChange.owned` of the last reduction that contained it
        self._owned: dict[str, Any] = {}
        self._change: ResidualChange | None = None  # new residuals of the collective in flight
        self._lock = threading.Lock()  # needed because collectives run in background threads
        self._turns: WeakKeyDictionary[Channel, Turns] = WeakKeyDictionary()  # order of the collectives of each group

    def __repr__(self) -> str:
        return f"<codec.torch.Feedback {self.spec}, {len(self._sizes)} parameters>"

    def norms(self) -> dict[str, float]:
        """Return the Euclidean norm of this rank's residual by parameter name; "" stands for a tensor without names."""
        with self._lock:
            return self._pair.norms()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's residuals. A collective in flight has not changed them yet.

        Returns
        -------
        dict
            Integers, strings, and two dicts of float32 tensors, which ``torch.load(weights_only=True)`` accepts.
        """
        with self._lock:
            return checkpoint.save(self._owner, self._op, self._pair.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the residuals by copies of those in a state of this rank.

        Parameters
        ----------
        state : mapping
            Return value of :meth:`state_dict` on this rank, or this rank's item of the list that :meth:`reshard`
            returns. The ranks may be on other machines than before: residuals are converted in the next collective.

        Raises
        ------
        StateError
            `state` is no such state, or a collective is in flight. Residuals are unchanged. If the state belongs to
            another rank or number of ranks, the next collective raises this error.
        """
        place, op, parts = checkpoint.parse(state)
        pair = ResidualPair(self.spec, self.decay)
        pair.load_state_dict(parts)
        with self._lock:
            if self._change is not None and not self._change.is_over:
                raise StateError(
                    "a collective in flight uses these residuals: wait for the collective before a state is loaded"
                )
            self._pair, self._owner, self._op, self._change = pair, place, op, None
            self._sizes, self._owned = {}, {}
            for name, _, stop in pair.ranges():
                self._sizes[name] = max(stop, self._sizes.get(name, 0))
            self._open = {*self._sizes} if place.within > 1 else set()

    @staticmethod
    def reshard(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
        """Return states for another number of ranks, whose residuals have the same total effect as the given ones.

        If the collectives are means, every new rank receives the mean of the ranks' residuals of their own values; if
        they are sums, an equal share of the sum of these residuals. Residuals of encoded sums move to the new ranks
        unchanged.

        Parameters
        ----------
        states : sequence of dict
            State of each old rank, in rank order.
        world_size : int
            Number of new ranks.

        Returns
        -------
        list of dict
            State of each new rank, for :meth:`load_state_dict`.

        Raises
        ------
        StateError
            `states` are not the states of all ranks of one Feedback.
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

    # Methods that collectives call, in the background threads of their groups

    def forked(self, place: tuple[int, int] | None = None, *, worker: float = 1.0, server: float = 1.0) -> "Feedback":
        """Return a Feedback with the same residuals, which collectives change while this object keeps the old ones.

        Both share memory: once the copy has changed each residual once, use only one of them.

        Parameters
        ----------
        place : (int, int), optional
            New rank and number of ranks, after the group has changed. Default: those of this object.
        worker, server : float
            Factors of the residuals of this rank's own values, and of those of encoded sums.
        """
        found = Feedback(self.spec, decay=self.decay)
        with self._lock:
            found._pair, found._owner, found._op = self._pair.forked(), self._owner, self._op
            found._sizes, found._open, found._owned = self._sizes.copy(), self._open.copy(), self._owned.copy()
        if place is not None and UNKNOWN not in found._owner:
            found._owner, found._owned = ResidualOwner(*place, self._owner.within), {}
        found._pair.multiply(worker, server)
        return found

    def turns(self, channel: Channel) -> Turns:
        """Return the queue in which the collectives of a group wait until the previous one has ended."""
        return self._turns.setdefault(channel, Turns())

    def begin(self, r: Reduction, layout: Layout, channel: Channel, levels: Levels) -> ResidualChange:
        """Begin to change the residuals of a tensor; for implementations of collectives.

        Residuals of values that other ranks of this machine now encode are added to the values of `r`.

        Parameters
        ----------
        r : Reduction
            Reduction of the whole tensor, before it is reduced within the machine.
        layout : Layout
            Ranges of parameters whose values, in this order, are the values of `r`.
        channel : Channel
            Channel of the group.
        levels : Levels
            Levels of the collective.

        Returns
        -------
        ResidualChange
            New residuals. Pass this object to :meth:`commit` or :meth:`drop` when the collective has ended.

        Raises
        ------
        ArgumentError, SpecError, StateError
            The codec is not a contraction; the residuals belong to another rank, op or tensor size; or another
            collective is in flight. The residuals are unchanged.
        """
        check_contraction(r.spec)
        with self._lock:
            if self._change is not None and not self._change.is_over:
                raise StateError(
                    "another collective in flight uses this Feedback: wait for that collective first, or use another "
                    "Feedback"
                )
            self._check(r.op, layout, (channel.rank, channel.size))
            pair = self._pair.forked()
            if r.op == "mean":
                pair.move(self._owner, ResidualOwner(*self._owner[:2], levels.within.size))
            if not levels.flat:
                pair.flush_outside(r, layout, window_of(r, levels.within), levels)
            self._change = ResidualChange(pair, layout, r.op, channel, levels)
            return self._change

    def feed(self, change: ResidualChange, r: Reduction, layout: Layout, algorithm: Algorithm) -> None:
        """Make the encoder of a reduction add the residuals, and store the encoding errors as new residuals.

        Parameters
        ----------
        change : ResidualChange
            Return value of :meth:`begin`.
        r : Reduction
            Reduction that sends frames: of the whole tensor, or of this rank's window of it.
        layout : Layout
            Ranges of parameters whose values, in this order, are the values of `r`.
        algorithm : Algorithm
            Algorithm of the reduction.
        """
        peers = change.levels.between
        change.owned = layout, owned_values(r, algorithm, peers.rank, peers.size)
        moved = any(self._owned.get(name) != change.owned for name, _, _ in layout)
        change.pair.feed(r, layout, change.owned[1], peers.size, moved=moved)

    def commit(self, change: ResidualChange) -> None:
        """Store the new residuals of a collective that has succeeded on all ranks.

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
            self._owner = ResidualOwner(change.channel.rank, change.channel.size, change.levels.within.size)
            self._op = change.op
            self._owned |= dict.fromkeys((name for name, _, _ in change.layout), change.owned)
            self._sizes |= {name: stop for name, _, stop in change.layout}
            self._open -= {name for name, _, _ in change.layout}

    def drop(self, change: ResidualChange) -> None:
        """Drop the new residuals of a collective that has failed; do nothing if they were committed."""
        with self._lock:
            if self._change is change:
                self._change = None

    def _check(self, op: str, layout: Layout, here: tuple[int, int]) -> None:
        """Raise StateError if residuals belong to another rank, ArgumentError if to another op or tensor size."""
        if not self._sizes:
            return
        rank, size, _ = self._owner
        if rank != UNKNOWN and (rank, size) != here:
            raise StateError(
                f"these residuals belong to rank {rank} of {size}, but this is rank {here[0]} of {here[1]}: load the "
                "state that this rank saved, or one that Feedback.reshard(states, world_size) returned for this number "
                "of ranks"
            )
        if self._op not in ("", op):
            raise ArgumentError(
                f"this Feedback holds residuals for op {self._op!r}, but the op is {op!r}: use another Feedback"
            )
        for name, _, n in layout:
            known = self._sizes.get(name, n)
            if known > n or (known < n and name not in self._open):
                what = f"parameter {name!r}" if name else "the tensor"
                raise ArgumentError(
                    f"{what} has {n} values, but its residual has {known}: give different tensors "
                    "different names, codec.view(tensor, segments={name: shape})"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return the residuals and the spec for pickle and copy."""
        return {"spec": self.spec, "decay": self.decay, "state": self.state_dict()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Restore the object from the return value of :meth:`__getstate__`."""
        self.__init__(saved["spec"], decay=saved["decay"])
        self.load_state_dict(saved["state"])
