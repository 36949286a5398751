"""Statistics of a pipeline stage."""

from dataclasses import dataclass, field

from codec.readable import Rounded, count, share
from codec.stateful.activation.change import ActivationStats
from codec.torch.pipelining.end import End
from codec.torch.pipelining.envelope import MessageKind


@dataclass(frozen=True, slots=True, repr=False)
class PipelineStats(Rounded):
    """Totals of one stage, from :meth:`CompressedStage.stats`.

    Attributes
    ----------
    forward_nbytes, backward_nbytes : int
        Bytes of activations and of gradients that the stage has sent, including repeated messages.
    raw_nbytes : int
        Bytes of these tensors without compression.
    refused_steps : int
        Number of attempts that were rolled back.
    sender, receiver : tuple of ActivationStats
        Statistics of the edge to the next stage, and of the edge from the previous stage, for each tensor.
        ``sender[0].change`` is the relative change of activations between epochs.
    choices : dict of str to int
        Number of successful steps for each choice of specs that "auto" has made; empty without "auto".
    """

    forward_nbytes: int
    backward_nbytes: int
    raw_nbytes: int
    refused_steps: int
    sender: tuple[ActivationStats, ...]
    receiver: tuple[ActivationStats, ...]
    choices: dict[str, int] = field(default_factory=dict[str, int])

    def __str__(self) -> str:
        """Return one line: bytes sent in both directions, change of activations, and number of refused steps."""
        sent = share(self.forward_nbytes + self.backward_nbytes, self.raw_nbytes)
        change = next((s.change for s in self.sender if s.change), ())
        moved = f", activations change by {change[-1]:.0%} between visits" if change else ""
        refused = f", {count(self.refused_steps, 'step')} refused" if self.refused_steps else ""
        return f"{sent}{moved}{refused}"


def stats_of(incoming: End | None, outgoing: End | None, refused_steps: int, choices: dict[str, int]) -> PipelineStats:
    """Return the statistics of a stage from those of its edges."""
    ends = [end for end in (incoming, outgoing) if end is not None]
    return PipelineStats(
        sum(end.sent[MessageKind.ACTIVATIONS] for end in ends),
        sum(end.sent[MessageKind.GRADIENTS] for end in ends),
        sum(end.sent_raw_nbytes for end in ends),
        refused_steps,
        tuple(d.stats() for d in outgoing.deltas) if outgoing else (),
        tuple(d.stats() for d in incoming.deltas) if incoming else (),
        choices,
    )
