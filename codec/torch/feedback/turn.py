"""Error feedback of one collective: residuals are copied for its request, and kept after its verdict."""

from typing import Any

from codec import ArgumentError, PeerError, StateError
from codec.arguments import shown
from codec.specs import Lossless, SpecLike, check_contraction
from codec.stateful.ranges import Layout, layout_of_view, numel
from codec.tensors.wrapper import View
from codec.torch.feedback.checkpoint import UNKNOWN
from codec.torch.feedback.feedback import Feedback
from codec.torch.feedback.pair import ResidualPair, owned_values
from codec.torch.reduction.host import Reduction
from codec.torch.transport.channel import Channel


class Turn:
    """Error feedback of one collective, as a context manager that drops new residuals unless :meth:`commit` was called.

    A collective without :meth:`begin` has no error feedback.
    """

    def __init__(self) -> None:
        self._feedback: Feedback | None = None
        self._pair: ResidualPair | None = None
        self._channel: Channel | None = None
        self._layout: Layout = ()
        self._owned = 0, 0
        self._op = ""

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, *exception: object) -> None:
        feedback, self._feedback = self._feedback, None
        if feedback is None:
            return
        with feedback._lock:
            if feedback._turn is self:
                feedback._turn = None

    @property
    def is_over(self) -> bool:
        """True if the collective was cancelled, so that its residuals will never be kept."""
        return self._channel is not None and self._channel.cancelled

    def begin(self, feedback: Feedback, r: Reduction, layout: Layout, channel: Channel, algorithm: str) -> None:
        """Make the frames of a reduction add the residuals.

        Parameters
        ----------
        feedback : Feedback
            The residuals.
        r : Reduction
            The reduction.
        layout : Layout
            Ranges of parameters that are the values of `r`.
        channel : Channel
            Channel of the group.
        algorithm : str
            Algorithm of an all-reduce that :func:`choose_algorithm` has chosen, or another collective.

        Raises
        ------
        ArgumentError, SpecError, StateError
            The residuals cannot be used for this reduction.
        """
        check_contraction(r.spec)
        if r.op == "max":
            raise ArgumentError("error feedback is for sums and means; op is a maximum")
        owned = owned_values(r, algorithm, channel.rank, channel.size)
        with feedback._lock:
            if feedback._turn is not None and not feedback._turn.is_over:
                raise StateError("a collective of another group uses this Feedback: wait for it first")
            _check(feedback, r.op, layout, (channel.rank, channel.size))
            place = layout, owned
            moved = any(feedback._owned.get(name) != place for name, _, _ in layout)
            pair = feedback._pair.forked()
            pair.feed(r, layout, owned, channel.size, moved=moved)
            feedback._turn = self
            self._feedback, self._pair, self._channel = feedback, pair, channel
            self._layout, self._owned, self._op = layout, owned, r.op

    def commit(self) -> None:
        """Keep the new residuals, after all ranks have succeeded."""
        feedback = self._feedback
        if feedback is None or self._pair is None or self._channel is None:
            return
        with feedback._lock:
            if feedback._turn is not self:
                raise PeerError("the collective was cancelled: make a new group")
            self._pair.commit()
            feedback._pair, feedback._turn = self._pair, None
            place = self._layout, self._owned
            feedback._owner, feedback._op = (self._channel.rank, self._channel.size), self._op
            feedback._owned |= dict.fromkeys((name for name, _, _ in self._layout), place)
            feedback._sizes |= {name: stop for name, _, stop in self._layout}


def spec_or_default(spec: SpecLike | None, feedback: Any) -> SpecLike:
    """Return the spec of a call: that of its error feedback, else Lossless, if the caller gave none.

    Raises
    ------
    ArgumentError
        `feedback` is neither None nor a Feedback.
    """
    if feedback is not None and not isinstance(feedback, Feedback):
        raise ArgumentError(f"feedback must be a codec.torch.Feedback, got {shown(feedback)}")
    if spec is not None:
        return spec
    return Lossless() if feedback is None else feedback.spec


def named(tensor: Any, r: Reduction) -> Layout:
    """Return the ranges of parameters that are the values of a reduction of `tensor`.

    Raises
    ------
    ArgumentError
        The segments of a view have names, but do not cover all its values.
    """
    if not isinstance(tensor, View) or tensor.names is None:
        return (("", 0, r.n),)
    layout = layout_of_view(tensor)
    if (n := numel(layout)) != r.n:
        raise ArgumentError(
            f"the view has {r.n} values, but its segments only {n}: name all values that have residuals"
        )
    return layout


def _check(feedback: Feedback, op: str, layout: Layout, here: tuple[int, int]) -> None:
    """Raise ArgumentError or StateError if the residuals are of other reductions than this one."""
    if not feedback._sizes:
        return
    owner = feedback._owner
    if UNKNOWN not in owner and owner != here:
        raise StateError(
            f"these residuals belong to rank {owner[0]} of {owner[1]}, and this is rank {here[0]} of {here[1]}: load "
            "this rank's own state, or one that Feedback.reshard(states, world_size) made for this number of ranks"
        )
    if feedback._op not in ("", op):
        raise ArgumentError(
            f"this Feedback holds residuals of a {feedback._op}, and op is a {op}: use another Feedback"
        )
    for name, _, n in layout:
        if feedback._sizes.get(name, n) != n:
            what = f"parameter {name!r}" if name else "the tensor"
            raise ArgumentError(
                f"{what} has {n} values, but its residual has {feedback._sizes[name]}: give different tensors "
                "different names, codec.view(tensor, segments={name: shape})"
            )
