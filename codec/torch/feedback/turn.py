"""Error feedback of a public collective: its arguments, and its life from request to verdict."""

from typing import Any

from codec import ArgumentError
from codec.arguments import shown
from codec.specs import Lossless, SpecLike
from codec.stateful.ranges import Layout, layout_of_view, numel
from codec.tensors.wrapper import View
from codec.torch.feedback.feedback import Change, Feedback
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.table import Algorithm
from codec.torch.transport.channel import Channel


class Turn:
    """Error feedback of one collective, as a context manager that drops new residuals unless :meth:`commit` was called.

    A collective without :meth:`begin` has no error feedback.
    """

    def __init__(self) -> None:
        self._feedback: Feedback | None = None
        self._change: Change | None = None

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._feedback is not None and self._change is not None:
            self._feedback.drop(self._change)

    def begin(self, feedback: Feedback, r: Reduction, layout: Layout, channel: Channel, algorithm: Algorithm) -> None:
        """Make the frames of a reduction add the residuals; as :meth:`Feedback.begin`."""
        self._change = feedback.begin(r, layout, channel, algorithm)
        self._feedback = feedback

    def commit(self) -> None:
        """Keep the new residuals, after all ranks have succeeded."""
        if self._feedback is not None and self._change is not None:
            self._feedback.commit(self._change)


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
