"""Synchronizations of parameters and buffers, which succeed on all ranks or on none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from codec import ArgumentError, CodecError, StateError, Status
from codec.arguments import shown
from codec.specs import Lossless
from codec.torch.feedback.feedback import Feedback
from codec.torch.local_steps import agreement, checkpoint, fragment, model, residuals
from codec.torch.local_steps.agreement import Position
from codec.torch.local_steps.fragment import Fragment
from codec.torch.local_steps.ranks import Flight, Problem, Ranks
from codec.torch.local_steps.settings import Settings

Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Pending:
    """Synchronization of a fragment that has started, and whose mean is not applied yet."""

    fragment: int  # index of the fragment
    due: int  # step after which the mean is applied
    mine: torch.Tensor  # this rank's changes when the synchronization started
    mean: torch.Tensor  # mean of the changes of all ranks; written while `flight` runs
    flight: Flight | None  # collective in flight; None if `mean` is complete, as in a loaded state


class Synchronizer:
    """Synchronizes parameters and buffers of this rank; stores their values at the last synchronization, and residuals.

    Parameters
    ----------
    settings : Settings
        Arguments of LocalSteps.
    module, optimizer, outer
        As for :class:`LocalSteps`.

    Raises
    ------
    ArgumentError
        The model or an optimizer is not supported.
    """

    def __init__(self, settings: Settings, module: Any, optimizer: Any, outer: Outer | None) -> None:
        self.settings = settings
        self.module, self.optimizer = model.module_of(module), model.optimizer_of(optimizer)
        self.parameters = model.trainable(self.module, self.optimizer)
        self.buffers = model.averaged_buffers(self.module)
        if len(self.parameters) < settings.fragments:
            raise ArgumentError(
                f"fragments={settings.fragments} cannot be made of {len(self.parameters)} parameters of these sizes, "
                "since a parameter is not divided: use fewer fragments"
            )
        self.fragments = fragment.cut(self.parameters, settings.fragments)
        self.feedback = self._new_feedback()
        self.outer = None if outer is None else _checked_outer(outer, self.fragments)
        self.pending: Pending | None = None
        self.rounds = self.failed = 0  # numbers of synchronizations that succeeded, and that failed

    def _new_feedback(self) -> Feedback | None:
        return Feedback(self.settings.spec, decay=self.settings.decay) if self.settings.has_feedback else None

    def reset(self) -> None:
        """Record the current parameters, which must be equal on all ranks, as values of the last synchronization."""
        for f in self.fragments:
            f.reset()

    # Synchronizations

    def synchronize(
        self, ranks: Ranks, step: int, fragments: Sequence[Fragment], *, buffers: bool, exact: bool = False
    ) -> None:
        """Synchronize some fragments, and optionally the buffers. If this fails, no parameter or buffer is changed.

        Parameters
        ----------
        ranks : Ranks
            The ranks.
        step : int
            Number of steps so far, for error messages.
        fragments : sequence of Fragment
            Fragments to synchronize.
        buffers : bool
            True: also average the buffers.
        exact : bool
            True: send the changes, with all residuals added, lossless.

        Raises
        ------
        ArgumentError
            A parameter or buffer holds NaN or Inf, or parameters of the model were replaced, removed or added.
        PeerError
            Another rank has raised an error, or is lost.
        """
        spec, feedback = self.settings.spec, self.feedback
        flat, problem = self._changes(fragments, step) if fragments else (None, None)
        if flat is not None and exact:
            spec, feedback = Lossless(), None
            if self.feedback is not None and problem is None:
                residuals.add_to(self.feedback, fragment.named(fragments, flat), ranks.size)
        try:
            means = self._buffer_means(ranks, problem) if buffers and self.buffers else {}
            if flat is not None:
                ranks.mean(fragment.view_of(fragments, flat), spec, problem, feedback, self.rounds)
        except CodecError:
            self.failed += 1
            raise
        if flat is not None:
            for f, mean in zip(fragments, fragment.split(fragments, flat), strict=True):
                f.apply(mean, self.outer)
            self.feedback = self._new_feedback() if exact else self.feedback
        with torch.no_grad():
            for name, mean in means.items():
                self.buffers[name].copy_(mean)
        self.rounds += 1

    def launch(self, ranks: Ranks, step: int, number: int) -> None:
        """Start the synchronization of the fragment with index `number`, in the background."""
        some = [self.fragments[number]]
        mine, problem = self._changes(some, step)
        mean = torch.empty_like(mine)
        x = fragment.view_of(some, mine)
        flight = ranks.begin(x, self.settings.spec, problem, self.feedback, self.rounds, mean)
        self.pending = Pending(number, step + self.settings.delay, mine, mean, flight)

    def land(self, ranks: Ranks) -> None:
        """Wait for the synchronization in flight, and apply its mean to the parameters; all ranks must call this.

        Raises
        ------
        ArgumentError, PeerError
            As for :meth:`synchronize`. The failed synchronization is dropped.
        """
        pending = self.pending
        if pending is None:
            return
        try:
            if pending.flight is not None:
                ranks.wait(pending.flight)
        except CodecError:
            self.pending = None
            self.failed += 1
            raise
        self._apply(pending)

    def leave(self) -> None:
        """Wait for the synchronization in flight; apply its mean, or drop it if it has failed.

        A collective fails on all ranks or on none, so all ranks apply or drop without exchanging messages.
        """
        pending = self.pending
        if pending is None:
            return
        try:
            if pending.flight is not None:
                pending.flight.work.wait()
        except CodecError:
            self.pending = None
            self.failed += 1
            return
        self._apply(pending)

    def _apply(self, pending: Pending) -> None:
        self.fragments[pending.fragment].apply(pending.mean, self.outer, since=pending.mine)
        self.pending = None
        self.rounds += 1

    def _changes(self, fragments: Sequence[Fragment], step: int) -> tuple[torch.Tensor, Problem | None]:
        """Return the changes of some fragments since their last synchronization, and a Problem if they are invalid."""
        flat = torch.empty(sum(f.n for f in fragments), device=fragments[0].flat.device, dtype=torch.float32)
        if text := model.change_of(self.module, self.parameters):
            return flat, Problem(text)
        for f, part in zip(fragments, fragment.split(fragments, flat), strict=True):
            f.differences(part)
        if name := fragment.nonfinite(fragments, flat):
            return flat, Problem(
                f"parameter {name!r} holds NaN or Inf after step {step}: no rank was changed; load a checkpoint, or "
                "lower the learning rate",
                Status.NONFINITE,
            )
        return flat, None

    def _buffer_means(self, ranks: Ranks, problem: Problem | None) -> dict[str, torch.Tensor]:
        """Return the mean over all ranks of each buffer, by name; raise the errors of :meth:`Ranks.mean`."""
        device, sizes = self.fragments[0].flat.device, [b.numel() for b in self.buffers.values()]
        flat = torch.cat([b.detach().reshape(-1).to(device, torch.float32) for b in self.buffers.values()])
        found = dict(zip(self.buffers, model.parts_of(flat, sizes), strict=True))
        if problem is None and bool(flat.isnan().any()):
            name = next(name for name, b in found.items() if bool(b.isnan().any()))
            problem = Problem(f"buffer {name!r} holds NaN: no rank was changed", Status.NONFINITE)
        ranks.mean(flat, Lossless(), problem)
        return {name: mean.view(self.buffers[name].shape) for name, mean in found.items()}

    # Other ranks

    def arguments(self, ranks: Ranks) -> dict[str, Any]:
        """Return the arguments, and the names, shapes and dtypes of tensors, which must be equal on all ranks."""
        s = self.settings
        tensors = {"parameters": self.parameters, "buffers": dict(self.module.named_buffers())}
        return {
            "every": s.every,
            "spec": str(s.spec),
            "decay": s.decay,
            "warmup": [s.warmup, str(s.warmup_spec)],
            "fragments": s.fragments,
            "delay": s.delay,
            "outer": None if self.outer is None else repr(self.outer),
            "algorithm": ranks.options.algorithm,
            **{k: [[n, list(x.shape), str(x.dtype)] for n, x in v.items()] for k, v in tensors.items()},
        }

    def position(self, steps: int) -> Position:
        """Return this rank's position after `steps` steps, for comparison with other ranks."""
        shared = [f.flat for f in self.fragments]
        if self.outer is not None:
            entries = self.outer.state_dict()["state"]
            shared += [x for i in sorted(entries) for x in entries[i].values() if isinstance(x, torch.Tensor)]
        return Position(steps, self.rounds, agreement.digest_of(shared))

    def take_from(self, ranks: Ranks, source: int, receivers: Sequence[int], rounds: int) -> None:
        """Copy the shared state of rank `source` to the ranks `receivers`; all ranks must call this.

        Parameters
        ----------
        ranks : Ranks
            The ranks.
        source : int
            Rank that sends its values of the last synchronization, its buffers, and the state of its outer optimizer.
        receivers : sequence of int
            Ranks whose state is replaced. Their parameters are set to the values of the last synchronization.
        rounds : int
            Number of synchronizations of `source`.
        """
        mine = [*(f.flat for f in self.fragments), *self.module.buffers()]
        theirs = agreement.send_tensors(ranks, source, receivers, mine)
        if self.outer is not None:
            outer = agreement.send_state(ranks, source, receivers, self.outer.state_dict())
            self._load_outer(outer)
        if ranks.rank not in receivers:
            return
        with torch.no_grad():
            for x, values in zip(mine, theirs, strict=True):
                x.copy_(values)
        for f in self.fragments:
            f.restore()
        self.feedback, self.pending, self.rounds = self._new_feedback(), None, rounds

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that this object restores; wait for the synchronization in flight first.

        Raises
        ------
        StateError
            The synchronization in flight has failed.
        """
        pending: dict[str, Any] = {}
        if (p := self.pending) is not None:
            try:
                if p.flight is not None:
                    p.flight.work.wait()
            except CodecError as e:
                raise StateError(
                    "the state cannot be saved, because the synchronization in flight has failed: call synchronize() "
                    "first, or change_group() if a rank is lost"
                ) from e
            pending = {"fragment": p.fragment, "due": p.due, "mine": p.mine.clone(), "mean": p.mean.clone()}
        return {
            "rounds": self.rounds,
            "fragments": len(self.fragments),
            "anchors": {name: x.clone() for name, x in self._anchors().items()},
            "residuals": {} if self.feedback is None else self.feedback.state_dict(),
            "outer": {} if self.outer is None else self.outer.state_dict(),
            "pending": pending,
        }

    def load_state_dict(self, state: Any, place: tuple[int, int]) -> checkpoint.Saved:
        """Replace the state by a saved one, and return its parsed form. After a StateError nothing is changed.

        `place` is this rank's number and the number of ranks; the state must have the same.
        """
        anchors = self._anchors()
        saved = checkpoint.parsed(state, anchors, [f.n for f in self.fragments], self.feedback, place)
        self._load_outer(saved.outer)
        with torch.no_grad():
            for name, x in saved.anchors.items():
                anchors[name].copy_(x)
        self.rounds, self.feedback, self.pending = saved.rounds, saved.feedback, None
        if p := saved.pending:
            number: int = p["fragment"]
            device = self.fragments[number].flat.device
            mine, mean = (p[name].to(device, copy=True) for name in ("mine", "mean"))
            self.pending = Pending(number, p["due"], mine, mean, None)
        return saved

    def _anchors(self) -> dict[str, torch.Tensor]:
        return {name: x for f in self.fragments for name, x in f.parts(f.flat)}

    def _load_outer(self, state: Mapping[str, Any]) -> None:
        """Load the state of the outer optimizer ({} if there is none). After a StateError nothing is changed."""
        checkpoint.check_outer(self.outer, state)
        if self.outer is None:
            return
        try:
            self.outer.load_state_dict(dict(state))
        except (ValueError, KeyError, TypeError) as e:
            raise StateError(f"the state does not fit the outer optimizer: {shown(e)}") from e


def _checked_outer(outer: Outer, fragments: Sequence[Fragment]) -> torch.optim.Optimizer:
    """Return the optimizer that the argument `outer` creates for the anchors; raise ArgumentError if there is none."""
    anchors = [x for f in fragments for x in f.anchors.values()]
    made: Any = outer(anchors) if callable(outer) else outer
    held = [p for group in getattr(made, "param_groups", ()) for p in group["params"]]
    if not isinstance(made, torch.optim.Optimizer) or {id(p) for p in held} != {id(p) for p in anchors}:
        raise ArgumentError(
            "outer must be a function that takes a list of parameters and returns a torch optimizer of all of them, "
            f"such as lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True), got {shown(made)}"
        )
    return made
