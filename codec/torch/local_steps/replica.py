"""State of a rank that takes local steps, most of which is equal on all ranks: comparison, transfer and checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from codec import ArgumentError, StateError
from codec.advisor.model_rules import small_of
from codec.arguments import shown
from codec.specs import Lossless
from codec.torch.feedback.feedback import Feedback
from codec.torch.local_steps import checkpoint
from codec.torch.local_steps.schedule import Schedule
from codec.torch.local_steps.settings import Settings
from codec.torch.replicas import agreement, fragment, model, residuals
from codec.torch.replicas.agreement import Position
from codec.torch.replicas.changes import Changes
from codec.torch.replicas.fragment import Fragment
from codec.torch.replicas.masters import Masters
from codec.torch.replicas.mean import Term
from codec.torch.replicas.ranks import Ranks
from codec.torch.replicas.replaced import Replaced, changed_names, digest_of

Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Replica:
    """Model of this rank, with values of the last synchronization, schedule, outer optimizer and residuals.

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
        self.module, self.optimizers = model.module_of(module), model.optimizers_of(optimizer)
        self.parameters = model.trainable(self.module, self.optimizers, all_stepped=settings.warmup > 0)
        self.buffers = model.averaged_buffers(self.module)
        self.fragments = fragment.cut(self.parameters, small_of(self.parameters.values()), settings.fragments)
        self.schedule = Schedule(settings)
        self.feedback = self.new_feedback()
        self.outer = None if outer is None else _checked_outer(outer, self.fragments)
        self.replaced: Replaced | None = None
        self.rounds: int = 0  # number of synchronizations that succeeded

    def new_feedback(self) -> Feedback | None:
        """Return an error feedback without residuals; None if the codec needs none."""
        return Feedback(self.settings.spec, decay=self.settings.decay) if self.settings.has_feedback else None

    def terms(self, changes: Changes, feedback: Feedback | None, *, exact: bool) -> list[Term]:
        """Return the terms of a collective; if `exact`, all of them are lossless, and without error feedback."""
        if exact:
            return changes.terms(Lossless(), None, 0, "")
        return changes.terms(self.settings.spec, feedback, self.rounds, self.settings.algorithm)

    def masters(self) -> Masters:
        """Return the current copies of the parameters in the optimizers' states."""
        return Masters.find(self.parameters.values(), self.optimizers)

    def reset(self) -> None:
        """Record the current parameters, which must be equal on all ranks, as values of the last synchronization."""
        for f in self.fragments:
            f.reset()

    # Other ranks

    def arguments(self, ranks: Ranks) -> dict[str, Any]:
        """Return the arguments, and the names, shapes and dtypes of tensors, which must be equal on all ranks."""
        s = self.settings
        tensors = model.tensors_of(self.module)
        kinds = {
            "parameters": self.parameters,
            "frozen parameters and buffers": {n: x for n, x in tensors.items() if n not in self.parameters},
        }
        return {
            "every": "a function" if callable(s.every) else s.every,
            "spec": str(s.spec),
            "decay": s.decay,
            "warmup": [s.warmup, str(s.warmup_spec)],
            "fragments": s.fragments,
            "delay": s.delay,
            "outer": None if self.outer is None else repr(self.outer),
            "optimizers": len(self.optimizers),
            "algorithm": s.algorithm or ranks.options.algorithm,
            **{k: [[n, list(x.shape), str(x.dtype)] for n, x in v.items()] for k, v in kinds.items()},
        }

    def _anchors(self) -> dict[str, torch.Tensor]:
        return fragment.anchors_by_name(self.fragments)

    def _others(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the module that are not synchronized parameters, by name."""
        return {name: x for name, x in model.tensors_of(self.module).items() if name not in self.parameters}

    def position(self, steps: int, *, whole: bool) -> Position:
        """Return this rank's position after `steps` steps, for comparison with other ranks.

        If `whole`, the digest includes frozen parameters and all buffers.
        """
        shared = list(self._anchors().values())
        if self.outer is not None:
            entries = self.outer.state_dict()["state"]
            shared += [x for i in sorted(entries) for x in entries[i].values() if isinstance(x, torch.Tensor)]
            shared += self._bases().values()
        if whole:
            shared += self._others().values()
        return Position(steps, self.rounds, self.schedule.start, self.schedule.length, agreement.digest_of(shared))

    def take_from(self, ranks: Ranks, source: int, receivers: Sequence[int], position: Position) -> list[str]:
        """Copy the shared state of rank `source` to the ranks `receivers`; all ranks must call this.

        Parameters
        ----------
        ranks : Ranks
            The ranks.
        source : int
            Rank that sends its values of the last synchronization, the module's other tensors, and the state of its
            outer optimizer.
        receivers : sequence of int
            Ranks whose state is replaced. Their parameters are set to the values of the last synchronization.
        position : Position
            Position of `source`.

        Returns
        -------
        list of str
            On a receiver, names of the tensors that were different.
        """
        mine = self._anchors() | self._others()
        theirs = agreement.send_tensors(ranks, source, receivers, list(mine.values()))
        if self.outer is not None:
            own = {"outer": self.outer.state_dict(), "bases": self._bases()}
            sent = agreement.send_state(ranks, source, receivers, own)
            self._load_outer(sent["outer"])
            self._load_bases(sent["bases"])
        if ranks.rank not in receivers:
            return []
        names, masters = changed_names(mine, theirs), self.masters()
        copies = [x for some in masters.copies.values() for x in some]
        self.replaced = Replaced(self.parameters, [*model.tensors_of(self.module).values(), *copies])
        with torch.no_grad():
            for x, values in zip(mine.values(), theirs, strict=True):
                x.copy_(values)
        for f in self.fragments:
            f.restore(masters)
        self.feedback, self.rounds = self.new_feedback(), position.rounds
        self.schedule.start, self.schedule.length = position.start, position.length
        return names

    def moved_residuals(self, ranks: Ranks) -> Feedback | None:
        """Return the error feedback of this rank for another group."""
        if self.feedback is None:
            return None
        return residuals.moved(self.feedback, ranks.rank, ranks.size, by_senders=self.settings.algorithm == "senders")

    # State

    def entries(self) -> dict[str, Any]:
        """Return the entries of a checkpoint, without those of a synchronization in flight."""
        return {
            "rounds": self.rounds,
            "start": self.schedule.start,
            "length": self.schedule.length,
            "parameters": digest_of(self.parameters),
            "anchors": {name: x.clone() for name, x in self._anchors().items()},
            "residuals": {} if self.feedback is None else self.feedback.state_dict(),
            "outer": {} if self.outer is None else self.outer.state_dict(),
            "bases": {name: x.clone() for name, x in self._bases().items()},
        }

    def load(self, state: Any, place: tuple[int, int]) -> checkpoint.Saved:
        """Replace the state by a saved one, and return its parsed form. After a StateError nothing is changed.

        `place` is this rank's number and the number of ranks; the state must have the same.
        """
        names = [[piece.name for piece in f.pieces] for f in self.fragments]
        saved = checkpoint.parsed(state, self._anchors(), names, self.feedback, place)
        replaced = checkpoint.replaced_of(saved, self.parameters, self.replaced)
        self._load_outer(saved.outer)
        if replaced is not None:
            replaced.restore()
        for f in self.fragments:
            fragment.store(f, saved.anchors)
        self._load_bases(saved.bases)
        self.rounds, self.feedback, self.replaced = saved.rounds, saved.feedback, None
        self.schedule.load(saved.start, saved.length, saved.steps)
        return saved

    def _bases(self) -> dict[str, torch.Tensor]:
        """Return the bases of all fragments that have some, by the name of the piece."""
        return {piece.name: x for f in self.fragments if f.bases for piece, x in zip(f.pieces, f.bases, strict=True)}

    def _load_bases(self, bases: Mapping[str, torch.Tensor]) -> None:
        for f in self.fragments:
            some = [
                bases[piece.name].to(a) for piece, a in zip(f.pieces, f.anchors, strict=True) if piece.name in bases
            ]
            f.bases = some if len(some) == len(f.pieces) else None

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
    anchors = [x for f in fragments for x in f.anchors]
    made: Any = outer(anchors) if callable(outer) else outer
    held = [p for group in getattr(made, "param_groups", ()) for p in group["params"]]
    if not isinstance(made, torch.optim.Optimizer) or {id(p) for p in held} != {id(p) for p in anchors}:
        raise ArgumentError(
            "outer must be a function that takes a list of parameters and returns a torch optimizer of all of them, "
            f"such as lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True), got {shown(made)}"
        )
    return made
