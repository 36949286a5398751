"""Error feedback in one collective: checks of ``feedback=``, and new residuals until all ranks have succeeded."""

from typing import Any, cast

from codec import ArgumentError
from codec.arguments import shown
from codec.specs import Lossless, Spec, SpecLike, require_feedback
from codec.stateful.ranges import Layout, cut, layout_of_view, numel
from codec.tensors.wrapper import View
from codec.torch.feedback.feedback import Feedback, ResidualChange
from codec.torch.network.waits import Wait
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.table import Algorithm
from codec.torch.transport.channel import Channel
from codec.torch.transport.levels import Levels


class FeedbackTurn:
    """Error feedback of one collective, as an asynchronous context manager.

    Leaving the context drops the new residuals, unless :meth:`commit` was called. Entering it waits until the previous
    collective of the group with the same Feedback has ended. A collective that does not call :meth:`begin` has no error
    feedback.

    Parameters
    ----------
    feedback : Feedback or None
        Error feedback. Objects of other types are ignored here, and rejected by :func:`spec_or_default`.
    channel : Channel
        Channel of the group.
    levels : Levels, optional
        Levels of the collective. Default: those of the group.
    """

    def __init__(self, feedback: Any, channel: Channel, levels: Levels | None = None) -> None:
        self._feedback = feedback if isinstance(feedback, Feedback) else None
        self._channel, self._levels = channel, levels or channel.levels
        self._change: ResidualChange | None = None
        self._after: Wait | None = None

    async def __aenter__(self) -> "FeedbackTurn":
        if self._feedback is not None:
            before, self._after = self._feedback.turns(self._channel).ask()
            if before is not None:
                await before
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._feedback is not None and self._change is not None:
            self._feedback.drop(self._change)
        if self._after is not None:
            self._after.complete()

    def begin(self, whole: Reduction, tensor: Any) -> None:
        """Begin to change the residuals of a tensor, or layout, if there is a Feedback; see :meth:`Feedback.begin`."""
        if self._feedback is not None:
            layout = _named(tensor, (0, whole.n))
            self._change = self._feedback.begin(whole, layout, self._channel, self._levels)

    def feed(self, r: Reduction, tensor: Any, window: tuple[int, int], algorithm: Algorithm) -> None:
        """Make the encoder of the values [begin, end) = `window` of the tensor add the residuals, after :meth:`begin`.

        See :meth:`Feedback.feed`.
        """
        if self._feedback is not None and self._change is not None:
            self._feedback.feed(self._change, r, _named(tensor, window), algorithm)

    def commit(self) -> None:
        """Commit the new residuals. Call this after all ranks have succeeded."""
        if self._feedback is not None and self._change is not None:
            self._feedback.commit(self._change)


def spec_or_default(spec: SpecLike | None, feedback: Any) -> SpecLike:
    """Return the spec of a collective. If the caller passed None: the spec of its Feedback, else Lossless.

    Raises
    ------
    ArgumentError, SpecError
        `feedback` is neither None, False nor a Feedback; or it is None, and the spec requires error feedback.
    """
    if isinstance(feedback, Feedback):
        return feedback.spec if spec is None else spec
    if feedback is not None and feedback is not False:
        raise ArgumentError(f"feedback must be a codec.torch.Feedback, None or False, got {shown(feedback)}")
    if feedback is None and isinstance(spec, Spec):
        require_feedback(
            spec,
            f"pass feedback=codec.torch.Feedback({spec!r}, decay=0.95), or feedback=False to reduce without error "
            "feedback",
        )
    return Lossless() if spec is None else spec


def _named(tensor: Any, window: tuple[int, int]) -> Layout:
    """Return the ranges of parameters whose values, in this order, are the values [begin, end) = `window` of `tensor`.

    Raises
    ------
    ArgumentError
        The segments of a view have names, but do not cover all its values.
    """
    if isinstance(tensor, tuple):
        return tuple(cut(cast(Layout, tensor), *window))
    if not isinstance(tensor, View) or tensor.names is None:
        return (("", *window),)
    layout, n = layout_of_view(tensor), int(tensor.tensor.numel())
    if numel(layout) != n:
        raise ArgumentError(
            f"the view has {n} values, but its segments have {numel(layout)}: with error feedback, segments must cover "
            "all values"
        )
    return tuple(cut(layout, *window))
