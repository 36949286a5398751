"""Send and receive the messages of one stage, and commit or roll back the state of its deltas."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from codec import ArgumentError, CallOptions, CodecError, PeerError, StateError
from codec.arguments import shown
from codec.stateful.activation.values import ids_of
from codec.torch.auto.edges import Sent
from codec.torch.group.communicator import close_communicator
from codec.torch.group.levels import group_of
from codec.torch.group.work import Work
from codec.torch.pipelining.end import Aborted, End
from codec.torch.pipelining.envelope import MessageKind, Place, pack
from codec.torch.pipelining.notes import Notes, Report
from codec.torch.pipelining.settings import Specs
from codec.torch.point_to_point.send_recv import PeerLink

_TAG = 1 << 30  # point-to-point tag of edge 0; messages of users should have lower tags

_NO_IDS = (
    "deltas of activations need sample ids: call schedule.step(x, sample_ids=ids) on the first stage, or make the "
    'stages with activations="direct"'
)


class StageTraffic:
    """Messages between one stage and its neighbours.

    Parameters
    ----------
    stage_index, num_stages : int
        Number of the stage, and number of stages.
    specs : Specs
        Specs of the stage.
    group : ProcessGroup or None
        Group of the pipeline.
    options : CallOptions or None
        Settings of the stage.
    rank_of : callable
        Function that returns the rank of a stage in the group.
    """

    def __init__(
        self,
        stage_index: int,
        num_stages: int,
        specs: Specs,
        group: Any,
        options: CallOptions | None,
        rank_of: Callable[[int], int],
    ) -> None:
        self.index, self.group, self.options = stage_index, group, options
        self.settings = {"number of stages": str(num_stages), **specs.shared()}  # equal on all ranks
        self.agreed = False  # True: settings were compared on all ranks, and no evaluation has run since
        self.notes: Notes | None = None  # errors and ids of the attempt in progress; None outside of attempts
        self.refused_steps = 0
        self.incoming = None if stage_index == 0 else End(stage_index - 1, "receiver", specs, options)
        self.outgoing = None if stage_index == num_stages - 1 else End(stage_index, "sender", specs, options)
        self.auto = specs.auto
        self._has_deltas, self._rank_of = specs.deltas is not None, rank_of
        self._links: dict[int, PeerLink] = {}  # connections by edge
        # Outputs and receive in flight, by (kind, micro-batch)
        self._expected: dict[tuple[MessageKind, int], tuple[Sequence[torch.Tensor], Work]] = {}
        self._sends: list[Work] = []
        self._run, self._training = 0, False
        self._broken = False

    @property
    def ends(self) -> list[End]:
        """Ends of the edges to the previous and the next stage."""
        return [end for end in (self.incoming, self.outgoing) if end is not None]

    # Messages of a run of the schedule

    def begin_run(self, *, training: bool) -> None:
        """Begin a run of the schedule.

        Raises
        ------
        StateError
            A training step is not inside an attempt.
        PeerError
            An earlier step was interrupted.
        """
        self.check_usable()
        if training and self.notes is None:
            raise StateError("a training step of compressed stages must run inside codec.torch.pipelining.attempts()")
        self._run, self._training = self._run + 1, training
        self._expected.clear()
        if self.notes is None:
            # After an evaluation, torch exchanges shapes again for the next step. The next attempt compares settings
            # again, since a rank may have failed in the evaluation.
            self.agreed = False
            self.wait_for_sends()
        else:
            self.notes.begin_run()

    def take_ids(self, chunk: int, given: Any) -> None:
        """Check and store the sample ids that the caller has passed for a micro-batch: a tensor or None."""
        if given is None or self.notes is None:
            return
        try:
            if not isinstance(given, torch.Tensor) or given.dim() != 1:
                text = "sample_ids must be an int64 tensor with one id for each sample"
                raise ArgumentError(f"{text}, got {shown(given)}")
            ids = ids_of(given)
            known = self.notes.ids.setdefault(chunk, ids)  # another stage of this rank may have received the ids
            if known != ids:
                raise ArgumentError(
                    f"sample_ids of micro-batch {chunk} must be equal at all stages of this rank, got {ids[:5]} and "
                    f"{known[:5]}"
                )
        except ArgumentError as e:
            self.notes.add(e, self.index)

    def send(self, kind: MessageKind, chunk: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send the tensors of a micro-batch; if the step has failed, send an ABORTED message instead."""
        end = self._end(outgoing=kind == MessageKind.ACTIVATIONS)
        place, notes = Place(chunk, self._run), self.notes
        message = b""
        if notes is None or not notes.failed:
            ids = notes.ids.get(chunk) if notes is not None and self._training else None
            try:
                if kind == MessageKind.ACTIVATIONS and self._training and self._has_deltas and ids is None:
                    raise ArgumentError(_NO_IDS)
                message = end.encode(kind, tensors, place, ids)
            except CodecError as e:
                self._note(e, end)
        message = message or pack(MessageKind.ABORTED, place, [tuple(t.shape) for t in tensors])
        self._sends.append(self._link(end).send(message))

    def expect(self, kind: MessageKind, chunk: int, outputs: Sequence[torch.Tensor]) -> None:
        """Start to receive the tensors of a micro-batch into `outputs`."""
        end = self._end(outgoing=kind == MessageKind.GRADIENTS)
        self._expected[kind, chunk] = outputs, self._link(end).receive(end.max_nbytes(kind, outputs))

    def receive(self, kind: MessageKind, chunk: int) -> list[torch.Tensor]:
        """Wait for the tensors of a micro-batch, and write them to the outputs of :meth:`expect`.

        If the step has failed, the outputs are filled with zeros.

        Returns
        -------
        list of torch.Tensor
            The outputs, or new tensors for activations with other shapes. Empty if there is no neighbour, or the
            neighbour is on this rank.

        Raises
        ------
        PeerError
            The neighbour is lost, or did not answer in time.
        """
        if (kind, chunk) not in self._expected:
            return []
        expected, work = self._expected.pop((kind, chunk))
        outputs = list(expected)
        end, notes = self._end(outgoing=kind == MessageKind.GRADIENTS), self.notes
        try:
            message = work.result()
        except BaseException:
            if notes is None:  # inside an attempt, Attempt.__exit__ handles the error
                self.abandon()
            raise
        try:
            known = None if notes is None else notes.ids.get(chunk)
            ids = end.decode(kind, message, outputs, Place(chunk, self._run), known)
            if ids and notes is not None:
                notes.ids[chunk] = ids
        except (CodecError, Aborted) as e:
            self._note(e, end)
            for output in outputs:
                output.detach().zero_()
        return outputs

    # Begin and end of an attempt

    def begin_attempt(self, notes: Notes) -> None:
        """Begin an attempt, which records its errors in `notes`."""
        self.notes = notes
        if self.auto is not None:
            for end in self.ends:
                end.sending.begin(self._link(end).info())

    def sent(self) -> list[Sent]:
        """Return measurements of the messages sent in the attempt; empty without "auto"."""
        return [] if self.auto is None else [end.sending.end(self._link(end).info()) for end in self.ends]

    def adapt(self, reports: Sequence[Report]) -> None:
        """With "auto", choose the specs of the next step from the reports of all ranks."""
        if self.auto is not None:
            self.auto.learn([r.auto for r in reports if r.auto is not None], logs=self.index == 0)
            for end in self.ends:
                end.use(self.auto)

    def wait_for_sends(self) -> None:
        """Wait until all messages are sent."""
        sends, self._sends = self._sends, []
        for work in sends:
            work.wait()

    def load_choice(self, saved: Any) -> None:
        """With "auto", set the specs to those saved in a checkpoint."""
        if self.auto is not None:
            self.auto.load_state_dict(saved)
            for end in self.ends:
                end.use(self.auto)

    def commit(self) -> None:
        """Commit m, the activations to store that this step has computed for its samples, on all edges."""
        for end in self.ends:
            end.commit()

    def rollback(self) -> None:
        """Drop the activations m that this step has computed, on all edges; stored activations are unchanged."""
        for end in self.ends:
            end.rollback()

    def forget(self, reports: Sequence[Report]) -> None:
        """Remove m, the stored activations, of samples in the reports. These samples are then sent raw."""
        if self.outgoing is not None:
            for report in reports:
                self.outgoing.forget([*report.unknown.get(self.outgoing.edge, ()), *report.samples])

    def abandon(self) -> None:
        """Close all connections, so that all ranks fail. The stage cannot be used afterwards."""
        self._broken = True
        for link in self._links.values():
            link.close()
        close_communicator(group_of(self.group), cancel=True)

    def check_usable(self) -> None:
        """Raise PeerError if the stage was abandoned."""
        if self._broken:
            raise PeerError(
                "an earlier step was interrupted, so that the stages cannot be used: make a new group and new stages"
            )

    def _note(self, error: CodecError | Aborted, end: End) -> None:
        """Record an error for the end of the attempt; the schedule must continue, since neighbours wait for messages.

        Outside of an attempt, close all connections and raise the error.
        """
        if self.notes is not None:
            self.notes.add(error, end.edge)
            return
        self.abandon()
        if isinstance(error, Aborted):
            raise PeerError(f"a stage beside stage {self.index} has failed: make a new group and new stages") from error
        raise error

    def _end(self, *, outgoing: bool) -> End:
        end = self.outgoing if outgoing else self.incoming
        assert end is not None
        return end

    def _link(self, end: End) -> PeerLink:
        link = self._links.get(end.edge)
        if link is None:
            peer = self._rank_of(self.index + 1 if end is self.outgoing else self.index - 1)
            link = self._links[end.edge] = PeerLink(peer, self.group, _TAG + end.edge, self.options)
        return link
