"""State of a rank that takes local steps, most of which is equal on all ranks: comparison, transfer and checkpoints."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from codec import ArgumentError, PeerError, StateError
from codec.advisor.model_rules import small_of
from codec.arguments import shown
from codec.torch._compat import local
from codec.torch.feedback.feedback import Feedback
from codec.torch.local_steps import checkpoint
from codec.torch.local_steps.schedule import Schedule
from codec.torch.local_steps.settings import LocalSettings
from codec.torch.network.version import hash64
from codec.torch.replicas import model, residuals
from codec.torch.replicas.changes import coded_ranges
from codec.torch.replicas.fragment import Fragment, cut
from codec.torch.replicas.holders import Holders, shard_of
from codec.torch.replicas.model import Masters
from codec.torch.replicas.ranks import Ranks
from codec.torch.replicas.transfer import digest_of, exchange_states, send_state, send_tensors

Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

_log = logging.getLogger("codec.torch")
_MOST_NAMES = 5  # maximum number of tensors that a message names


class Position(NamedTuple):
    """Progress of a rank, for comparison with the other ranks."""

    steps: int  # number of optimizer steps so far
    rounds: int  # number of synchronizations so far
    start: int  # step after which the current round of the schedule began
    length: int  # number of steps of this round


class Peers(NamedTuple):
    """Positions and values of all ranks."""

    positions: list[Position]  # by rank
    names: list[str]  # names of the module's tensors
    digests: list[list[int]]  # by rank, the hash of what must be equal on all ranks, for each tensor
    holders: Holders

    def differ(self, a: int, b: int, names: Collection[str]) -> bool:
        """Return True if two ranks have other positions, or other values of some tensors."""
        pairs = zip(self.names, self.digests[a], self.digests[b], strict=True)
        return self.positions[a] != self.positions[b] or any(x != y for name, x, y in pairs if name in names)


class FormerValues(NamedTuple):
    """Values of a model from before they were replaced by another rank's, in host memory.

    A program may load a checkpoint into the model before it creates the LocalSteps. Between synchronizations the
    parameters of ranks differ, so that the checkpoint of each rank but one is overwritten.
    :meth:`LocalSteps.load_state_dict` restores the values that its state belongs to.
    """

    digest: str  # digest of the parameters
    values: list[tuple[torch.Tensor, torch.Tensor]]  # tensors of the model and of optimizers, and their former values


class Replica:
    """Model of this rank, with values of the last synchronization, schedule, outer optimizer and residuals.

    Parameters
    ----------
    settings : LocalSettings
        Arguments of LocalSteps.
    module, optimizer, outer
        As for :class:`LocalSteps`.

    Raises
    ------
    ArgumentError
        The model or an optimizer is not supported.
    """

    def __init__(self, settings: LocalSettings, module: Any, optimizer: Any, outer: Outer | None) -> None:
        self.settings = settings
        self.module, self.optimizers = model.module_of(module), model.optimizers_of(optimizer)
        self.parameters = model.trainable(self.module, self.optimizers, all_stepped=settings.warmup > 0)
        self.buffers = model.averaged_buffers(self.module)
        self.fragments = cut(self.parameters, small_of(self.parameters.values()), settings.fragments)
        self.schedule = Schedule(settings)
        self.feedback = self.new_feedback()
        self.outer = None if outer is None else _checked_outer(outer, self.fragments)
        self.replaced: FormerValues | None = None  # values before those of another rank
        self.rounds: int = 0  # number of synchronizations that succeeded
        self.holders: Holders  # set by :meth:`join`

    def new_feedback(self) -> Feedback | None:
        """Return an error feedback without residuals; None if the codec needs none."""
        return Feedback(self.settings.spec, decay=self.settings.decay) if self.settings.has_feedback else None

    def masters(self) -> Masters:
        """Return the current copies of the parameters in the optimizers' states."""
        return model.masters_of(self.parameters.values(), self.optimizers)

    def reset(self) -> None:
        """Record the current parameters, which must be equal on all ranks, as values of the last synchronization."""
        for f in self.fragments:
            f.reset()

    # Other ranks

    def _arguments(self, ranks: Ranks) -> dict[str, str]:
        """Return the arguments that must be equal on all ranks, as texts."""
        s = self.settings
        found: dict[str, object] = {
            "every": "a function" if callable(s.every) else s.every,
            "spec": s.spec,
            "decay": s.decay,
            "warmup": f"{s.warmup}, {s.warmup_spec}",
            "fragments": s.fragments,
            "delay": s.delay,
            "outer": " ".join(repr(self.outer).split()),
            "number of optimizers": len(self.optimizers),
            "algorithm": s.algorithm or ranks.options.algorithm,
            "number of parameters": len(self.parameters),
            "number of frozen parameters and buffers": len(self._others()),
        }
        return {name: str(x) for name, x in found.items()}

    def _anchors(self) -> dict[str, torch.Tensor]:
        """Return the anchor of each piece by name; they share the memory of the fragments."""
        return {p.name: a.detach() for f in self.fragments for p, a in zip(f.pieces, f.anchors, strict=True)}

    def _others(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the module that are not synchronized parameters, by name."""
        return {name: x for name, x in model.tensors_of(self.module).items() if name not in self.parameters}

    def _digests(self, *, whole: bool) -> list[int]:
        """Return, for each tensor, a hash of its anchors and of the outer optimizer's state.

        Other tensors than synchronized parameters count only if `whole`.
        """
        shared: dict[str, list[torch.Tensor]] = {name: [] for name in self.parameters}
        for f in self.fragments:
            for i, (piece, anchor) in enumerate(zip(f.pieces, f.anchors, strict=True)):
                state: Any = None if self.outer is None else self.outer.state.get(anchor)
                found = [
                    anchor.detach(),
                    *(state[key] for key in sorted(state or ())),
                    *(f.bases[i : i + 1] if f.bases else ()),
                ]
                shared[piece.whole] += [x for x in found if isinstance(x, torch.Tensor)]
        shared |= {name: [x] if whole else [] for name, x in self._others().items()}
        return [hash64(digest_of(some)) for some in shared.values()]

    def _peers(self, ranks: Ranks, steps: int, *, whole: bool) -> Peers:
        """Compare the arguments and models of all ranks; return the positions and values of all ranks."""
        model.reshard(self.module)
        others, every = self._others(), model.every_tensor(self.module)
        tensors = {name: every[name] for name in (*self.parameters, *others)}
        items = [f"{name!r} of shape {tuple(x.shape)} and {x.dtype}" for name, x in tensors.items()]
        position = Position(steps, self.rounds, self.schedule.start, self.schedule.length)
        hashes, shards = [hash64(item) for item in items], [shard_of(x) for x in tensors.values()]
        site, n, k = ranks.levels.within.ranks[0], len(Position._fields), len(items)
        found = ranks.agreed(
            "a comparison",
            self._arguments(ranks),
            [*position, site, *hashes, *shards, *self._digests(whole=whole)],
        )
        for rank, numbers in enumerate(found):
            if item := next((x for x, a, b in zip(items, hashes, numbers[n + 1 :], strict=False) if a != b), None):
                raise PeerError(f"rank {rank} has another tensor in place of {item}: pass the same model on all ranks")
        tables = [[numbers[n + 1 + i * k : n + 1 + (i + 1) * k] for numbers in found] for i in range(3)]
        holders = Holders([*tensors], tables[1], [numbers[n] for numbers in found], ranks.levels)
        if not holders.flat:
            ranks.agreed("a comparison of shards", {}, error=holders.error())
        self.holders = holders
        return Peers([Position(*numbers[:n]) for numbers in found], [*tensors], tables[2], holders)

    def compare(self, ranks: Ranks, steps: int) -> None:
        """Compare arguments, models and positions of all ranks after `steps` steps; raise PeerError if they differ."""
        peers = self._peers(ranks, steps, whole=False)
        first = peers.positions[0]
        for rank, theirs in enumerate(peers.positions):
            pairs = [(peers.holders.source(rank, held.names), held.names) for held in peers.holders.groups]
            if theirs != first or any(peers.differ(rank, source, names) for source, names in pairs):
                raise PeerError(
                    f"rank {rank} is at step {theirs.steps}, synchronization {theirs.rounds}, and rank 0 at step "
                    f"{first.steps}, synchronization {first.rounds}; if these are equal, the synchronized parameters "
                    "differ, or the schedule. Load states that all ranks saved at the same step"
                )

    def join(self, ranks: Ranks, steps: int) -> int | None:
        """Compare the ranks; a rank that is behind receives the state of the most advanced one.

        Before the first step, frozen parameters and buffers are compared, too.

        Returns
        -------
        int or None
            Number of steps of the rank whose state this rank has received; None if it has received none.

        Raises
        ------
        PeerError
            Arguments or models differ, or a rank is lost.
        """
        peers = self._peers(ranks, steps, whole=steps == 0)
        positions = peers.positions
        first = max(range(ranks.size), key=lambda rank: (positions[rank].rounds, positions[rank].steps, -rank))
        names = self._take_from(ranks, peers, first)
        self._hand_over_residuals(ranks)
        if names is None:
            return None
        before, now = positions[ranks.rank], positions[first]
        joins = (before.steps, before.rounds) != (now.steps, now.rounds)  # else the program has not loaded a state
        source = peers.holders.source(ranks.rank, peers.names, first)
        _log.log(
            logging.INFO if joins else logging.WARNING,
            "rank %d of %d had other values than rank %d in %s%s, and has taken those of rank %d%s",
            ranks.rank,
            ranks.size,
            source,
            ", ".join(map(repr, names[:_MOST_NAMES])),
            f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "",
            source,
            "" if joins else "; to resume from a checkpoint, call load_state_dict() of the LocalSteps, too",
        )
        return now.steps

    def _take_from(self, ranks: Ranks, peers: Peers, first: int) -> list[str] | None:
        """Copy the shared state of the site of rank `first` to the ranks that differ; all ranks call this.

        The state consists of the values of the last synchronization, to which the parameters of receivers are set, the
        module's other tensors, and the state of the outer optimizer. A rank receives them from the first rank of the
        site that holds the same tensors. Return the names of the tensors that were different; None if this rank is no
        receiver.
        """
        holders = peers.holders
        receivers = set[int]()
        pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for held in holders.groups:
            every = {rank: holders.source(rank, held.names, first) for rank in range(ranks.size)}
            sources = {rank: source for rank, source in every.items() if peers.differ(rank, source, held.names)}
            if any(peers.positions[source] != peers.positions[first] for source in every.values()):
                raise PeerError(
                    f"ranks of the site of rank {first} are at different steps: load states that all of them saved at "
                    "the same step"
                )
            if sources:
                mine = self._tensors(held.names)
                theirs = send_tensors(ranks, sources, [*mine.values()])
                pairs += zip(mine, mine.values(), theirs, strict=True) if ranks.rank in sources else []
                receivers |= sources.keys()
        if receivers and self.outer is not None:
            own = {"outer": self.outer.state_dict(), "bases": self._bases()}
            sent = send_state(ranks, {rank: holders.source(rank, peers.names, first) for rank in receivers}, own)
            self._load_outer(sent["outer"])
            self._load_bases(sent["bases"])
        if ranks.rank not in receivers:
            return None
        names = [name for name, x, values in pairs if digest_of([x]) != digest_of([values])]
        masters = self.masters()
        changed = [*model.tensors_of(self.module).values(), *(x for some in masters.values() for x in some)]
        self.replaced = FormerValues(self.digest(), [(x, x.detach().to("cpu", copy=True)) for x in changed])
        with torch.no_grad():
            for _, x, values in pairs:
                x.copy_(values)
        for f in self.fragments:
            f.restore(masters)
        position = peers.positions[first]
        self.feedback, self.rounds = self.new_feedback(), position.rounds
        self.schedule.start, self.schedule.length = position.start, position.length
        return names

    def _tensors(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the anchors, by piece, and other tensors of the module with some names."""
        anchors = self._anchors()
        pieces = [piece.name for f in self.fragments for piece in f.pieces if piece.whole in names]
        return {name: anchors[name] for name in pieces} | {n: x for n, x in self._others().items() if n in names}

    def share(self) -> int:
        """Return the number of synchronized values, divided by the number of ranks of this site that hold them."""
        size = {name: held.holders.size for held in self.holders.groups for name in held.names}
        return round(sum(piece.n / size[piece.whole] for f in self.fragments for piece in f.pieces))

    def moved_residuals(self, former: Ranks, ranks: Ranks) -> Feedback | None:
        """Return the error feedback of this rank for another group.

        In a mean over N sites, the residual of a rank's own values counts 1 / N. For M sites, it is multiplied by
        M / N, so that its effect on the parameters stays the same; not so for means over the ranks that sent a value.
        Residuals of encoded sums are errors of the mean itself, and stay unchanged.
        """
        if self.feedback is None:
            return None
        factor = 1.0 if self.settings.algorithm == "senders" else ranks.sites / former.sites
        return self.feedback.forked((ranks.rank, ranks.size), worker=factor)

    def _hand_over_residuals(self, ranks: Ranks) -> None:
        """Give residuals to the ranks of this site that encode their values, if its ranks have changed."""
        if self.holders.flat or self.feedback is None:
            return
        windows, state = coded_ranges(self.fragments, self.holders), self.feedback.state_dict()
        moves = ranks.agreed("residuals", {}, [int(not residuals.are_within(state, windows))])
        if any(move for [move] in moves):
            states = exchange_states(ranks, state)
            self.feedback = residuals.gathered(self.feedback, states, windows, (ranks.rank, ranks.size))

    # State

    def digest(self) -> str:
        """Return the digest of the parameters by which a state recognizes the model that it belongs to."""
        return digest_of(map(local, self.parameters.values()))

    def entries(self) -> dict[str, Any]:
        """Return the entries of a checkpoint, without those of a synchronization in flight."""
        return {
            "rounds": self.rounds,
            "start": self.schedule.start,
            "length": self.schedule.length,
            "parameters": self.digest(),
            "anchors": {name: x.clone() for name, x in self._anchors().items()},
            "residuals": {} if self.feedback is None else self.feedback.state_dict(),
            "outer": {} if self.outer is None else self.outer.state_dict(),
            "bases": {name: x.clone() for name, x in self._bases().items()},
        }

    def load(self, state: Any, place: tuple[int, int]) -> checkpoint.LocalState:
        """Replace the state by a saved one, and return its parsed form. After a StateError nothing is changed.

        `place` is this rank's number and the number of ranks; the state must have the same.
        """
        names = [[piece.name for piece in f.pieces] for f in self.fragments]
        saved = checkpoint.parsed(state, self._anchors(), names, self.feedback, place)
        former = self.replaced if self.replaced is not None and saved.parameters == self.replaced.digest else None
        if former is None and saved.parameters != self.digest():
            raise StateError(
                "the model does not have the parameters with which this state was saved: call model.load_state_dict() "
                "with the model that this rank saved together with the state, and then load_state_dict() of the "
                "LocalSteps"
            )
        windows = coded_ranges(self.fragments, self.holders)
        if saved.feedback is not None and not residuals.are_within(saved.feedback.state_dict(), windows):
            raise StateError(
                "the state was saved with another number of ranks a site, between which residuals are divided: load it "
                "with the group= of the saved LocalSteps, and call change_group()"
            )
        self._load_outer(saved.outer)
        with torch.no_grad():
            for x, values in former.values if former is not None else ():
                x.copy_(values)
            for name, anchor in self._anchors().items():
                anchor.copy_(saved.anchors[name])
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
        except (ValueError, KeyError, TypeError, RuntimeError) as e:  # such as a tensor that cannot be copied
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
