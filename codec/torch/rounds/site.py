"""Model of a site: its changes as frames, means of the changes of several sites, and snapshots."""

import io
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

import codec
from codec import ArgumentError, CallOptions, CodecError, FrameError
from codec.arguments import shown
from codec.tensors.wrapper import View
from codec.torch._compat import from_numpy
from codec.torch.local_steps.checkpoint import check_outer
from codec.torch.local_steps.replica import FormerValues, Outer, Replica
from codec.torch.local_steps.settings import LocalSettings
from codec.torch.replicas import model
from codec.torch.replicas.changes import Changes
from codec.torch.replicas.holders import Holders, is_sharded
from codec.torch.replicas.landing import Landing
from codec.torch.replicas.ranks import MeanTerm
from codec.torch.replicas.transfer import digest_of
from codec.torch.rounds.objects import HEAD_NBYTES
from codec.torch.saving.state import pack_state, unpack_state
from codec.torch.transport.levels import Levels

_Array = Any  # float32 array
_SPARE_NBYTES = 1 << 20  # upper bound of the bytes of a snapshot that belong to no tensor
_TENSOR_NBYTES = 1 << 12  # upper bound of the bytes of a tensor in a snapshot beside its values: names, shape, padding


@dataclass
class Encoded:
    """Change of a site as frames."""

    frames: list[bytes]
    changes: Changes  # the change before encoding, without residuals
    residual: _Array | None  # residual after the change was sent


class Site(Replica):
    """Model of a site, with the anchors of the last round, the outer optimizer and the residual.

    Parameters
    ----------
    settings : LocalSettings
        Arguments of :class:`Rounds`.
    module, optimizer, outer
        As for :class:`Rounds`.
    options : CallOptions
        Settings of encoders and decoders.

    Attributes
    ----------
    residual : array or None
        Encoding errors of the last change that was merged; None if there are none.
    agreement : float
        Agreement of the sites' changes in the last round, as :meth:`Changes.agreement` returns it.
    """

    def __init__(
        self, settings: LocalSettings, module: Any, optimizer: Any, outer: Outer | None, options: CallOptions
    ) -> None:
        super().__init__(settings, module, optimizer, outer)
        if name := next((name for name, p in self.parameters.items() if is_sharded(p)), None):
            raise ArgumentError(f"parameter {name!r} is sharded, but a site of Rounds is one process: use LocalSteps")
        names = [*self.parameters]
        self.holders = Holders(names, [[0] * len(names)], [0], Levels(1, 0))
        self._options = options
        self.residual: _Array | None = None
        self.agreement = float("nan")
        self.most_nbytes = self._most_nbytes()
        self._frozen = self._frozen_digest()

    @property
    def anchors(self) -> dict[str, torch.Tensor]:
        """Anchor of each piece by name."""
        return self._anchors()

    @property
    def residual_size(self) -> int:
        """Number of values that are sent with error feedback."""
        return sum(piece.n for piece in self.fragments[0].pieces if not piece.exact)

    def load_outer(self, state: Mapping[str, Any]) -> None:
        """Load the state of the outer optimizer ({} if there is none). After a StateError nothing is changed."""
        self._load_outer(state)

    # Changes

    def changes(self) -> Changes:
        """Return the changes since the anchors."""
        return Changes(self.fragments, self.masters(), self.buffers, self.holders)

    def encoded(self, steps: int, stream: int) -> Encoded:
        """Encode the changes since the anchors, after `steps` steps. Nothing of this object changes.

        Raises
        ------
        ArgumentError
            A parameter or buffer holds NaN or Inf, or parameters of the model were replaced, removed or added.
        """
        if text := model.change_of(self.module, self.parameters):
            raise ArgumentError(text.replace("LocalSteps", "Rounds"))
        changes = self.changes()
        if error := changes.error(steps):
            raise error
        frames: list[Any] = []
        residual: _Array | None = None
        for term in self._terms(changes):
            values: Any = term.values
            if is_coded := isinstance(values, View):
                values = View(values.tensor.cpu(), values.dtype, values.segments)
            else:
                values = values.cpu()
            how: dict[str, Any] = {"options": self._options}
            if is_coded and self.settings.has_feedback:
                n = values.tensor.numel()
                before = np.zeros(n, np.float32) if self.residual is None else self.residual
                residual = before * np.float32(self.settings.decay)
                how |= {"residual": residual, "feedback": True}
            frames.append(codec.encode(values, term.spec, stream=stream, **how))
        return Encoded(frames, changes, residual)

    def _terms(self, changes: Changes) -> list[MeanTerm]:
        return changes.terms(self.settings.spec, None, 0, "")

    def _most_nbytes(self) -> int:
        """Return the upper bound of the size of a change in the store."""
        terms = self._terms(self.changes())
        return HEAD_NBYTES + 1024 + sum(codec.bound(_flat(x).numel(), "float32", x.spec) for x in terms)

    def decoded(self, payload: memoryview, sizes: Sequence[int]) -> list[_Array]:
        """Decode the frames of a change.

        Raises
        ------
        FrameError
            The frames are damaged, are of another model, or hold NaN or Inf.
        """
        exact = sum(piece.n for piece in self.fragments[0].pieces if piece.exact) + 1  # and the norm
        counts = [*filter(None, [self.residual_size]), exact + sum(b.numel() for b in self.buffers.values())]
        if sum(sizes) != len(payload) or len(sizes) != len(counts):
            raise FrameError("the change does not have the frames of this model")
        found: list[_Array] = []
        begin = 0
        for n, nbytes in zip(counts, sizes, strict=True):
            out = np.empty(n, np.float32)
            try:
                codec.decode(payload[begin : begin + nbytes], out=out, options=self._options)
            except FrameError:
                raise
            except CodecError as e:
                raise FrameError(f"the change has a frame of another model: {e}") from e
            if not np.isfinite(out).all():
                raise FrameError("the change holds NaN or Inf")
            found.append(out)
            begin += nbytes
        return found

    def check_norms(self, values: Sequence[_Array]) -> None:
        """Raise FrameError if the values of a frame have a larger norm than ``codec.options(max_norm=)`` allows."""
        most = self._options.max_norm
        if most is not None and (norm := max(float(np.linalg.norm(x.astype(np.float64))) for x in values)) > most:
            raise FrameError(f"the change has the norm {norm:.3g}, but max_norm is {most:.3g}")

    def mean(self, changes: Iterable[tuple[float, list[_Array]]]) -> Changes:
        """Return the weighted mean of decoded changes.

        All sites compute it in the same order on their CPUs, with a rounding of each product and sum, so it is
        bit-identical. With :class:`codec.TopK`, the weights of a value are those of the sites that have sent it.

        Parameters
        ----------
        changes : iterable of (float, list of array)
            Share of each change in all weights, and its values, which are overwritten.
        """
        totals: list[_Array] = []
        shares: _Array | None = None
        for share, values in changes:
            if self.settings.algorithm == "senders" and len(values) > 1:
                sent = (values[0] != 0).astype(np.float32) * np.float32(share)
                shares = sent if shares is None else shares + sent
            for x in values:
                np.multiply(x, np.float32(share), out=x)
            if not totals:
                totals = values
                continue
            for total, x in zip(totals, values, strict=True):
                np.add(total, x, out=total)
        if shares is not None:
            np.divide(totals[0], shares, out=totals[0], where=shares > 0)
        found = self.changes()
        for term, total in zip(self._terms(found), totals, strict=True):
            _flat(term).copy_(from_numpy(total))
        return found

    @torch.no_grad()
    def complete(self, landing: Landing, *, buffers: bool) -> None:
        """Apply a mean to anchors and parameters; if `buffers`, to the buffers, too. This can be repeated."""
        landing.move_anchors()
        landing.write(self.masters())
        assert landing.changes is not None
        for name, mean in landing.changes.means.items() if buffers else ():
            self.buffers[name].copy_(mean)
        self.agreement = landing.changes.agreement()

    def record_former(self) -> None:
        """Record the parameters of the program, which a checkpoint may have set, before the run's replace them."""
        changed = [*model.tensors_of(self.module).values(), *(x for some in self.masters().values() for x in some)]
        self.replaced = FormerValues(self.digest(), [(x, x.detach().to("cpu", copy=True)) for x in changed])

    def restore(self) -> None:
        """Set the parameters to the anchors: float64 parameters may still have changes that float32 rounds away."""
        masters = self.masters()
        for f in self.fragments:
            f.restore(masters)

    @contextmanager
    def averaged(self) -> Generator[None]:
        """Return a context manager within which the parameters are the anchors."""
        some = [
            (piece.values, a.detach()) for f in self.fragments for piece, a in zip(f.pieces, f.anchors, strict=True)
        ]
        own = [x.clone() for x, _ in some]
        try:
            with torch.no_grad():
                for x, anchor in some:
                    x.copy_(anchor)
            yield
        finally:
            with torch.no_grad():
                for (x, _), values in zip(some, own, strict=True):
                    x.copy_(values)

    def unmoved(self) -> list[list[torch.Tensor]]:
        """Return zeros as the merged part of this site's changes: all of them are kept when a mean is applied."""
        return [[torch.zeros((), dtype=torch.float32, device=a.device) for a in f.anchors] for f in self.fragments]

    # State that is equal on all sites

    def anchors_digest(self) -> str:
        """Return the digest of the anchors and of the outer optimizer's state."""
        return self.digest_of({"anchors": self.anchors, "outer": self._outer_state()})

    def digest_of(self, state: Mapping[str, Any]) -> str:
        """Return the digest of the anchors, and of the outer optimizer's state, in the state of a snapshot."""
        outer = state["outer"].get("state", {})
        entries = [outer[i][key] for i in sorted(outer) for key in sorted(outer[i])]
        anchors = [state["anchors"][name] for name in self.anchors]
        return digest_of([*anchors, *(x for x in entries if isinstance(x, torch.Tensor))])

    def _outer_state(self) -> dict[str, Any]:
        return {} if self.outer is None else self.outer.state_dict()

    def arguments(self) -> dict[str, str]:
        """Return the arguments that must be equal on all sites, as texts."""
        s = self.settings
        shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self.parameters.items()]
        buffers = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in self._tensor_buffers().items()]
        return {
            "spec": str(s.spec),
            "decay": str(s.decay),
            "outer": "None" if self.outer is None else f"{type(self.outer).__qualname__} {self.outer.defaults}",
            "parameters": f"{len(shapes)}, with digest {_text_digest(shapes)}",
            "buffers": f"{len(buffers)}, with digest {_text_digest(buffers)}",
            "frozen parameters": self._frozen,
        }

    def _tensor_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that a site which joins adopts."""
        names = {name for name, _ in self.module.named_buffers()}
        return {name: x for name, x in self._others().items() if name in names}

    def _frozen_digest(self) -> str:
        """Return number and digest of the frozen parameters, whose values snapshots do not have."""
        buffers = self._tensor_buffers()
        frozen = {name: x for name, x in self._others().items() if name not in buffers}
        return f"{len(frozen)}, with digest {digest_of(frozen.values())}"

    def snapshot(self) -> bytes:
        """Return the anchors, the buffers and the state of the outer optimizer, as lossless frames."""
        state = {
            "anchors": self.anchors,
            "buffers": {name: x.clone() for name, x in self._tensor_buffers().items()},
            "outer": self._outer_state(),
        }
        file = io.BytesIO()
        torch.save(pack_state(state), file)
        return file.getvalue()

    @property
    def most_snapshot_nbytes(self) -> int:
        """Upper bound of the size of a snapshot in the store; the outer optimizer may have four values a parameter."""
        tensors = [*self._tensor_buffers().values(), *(5 - 4 * (self.outer is None)) * [*self.anchors.values()]]
        return HEAD_NBYTES + _SPARE_NBYTES + sum(x.nbytes * 5 // 4 + _TENSOR_NBYTES for x in tensors)

    def parsed(self, payload: memoryview) -> dict[str, Any]:
        """Return the tensors of a snapshot.

        Raises
        ------
        FrameError, StateError
            The snapshot is damaged, or is of another model or outer optimizer.
        """
        try:
            state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
            largest = max(x.nbytes for x in [*self.anchors.values(), *self._tensor_buffers().values()])
            state = unpack_state(state, max_nbytes=max(1024, 2 * largest))
        except Exception as e:  # torch does not document which errors damaged files raise
            raise FrameError(f"a snapshot in the store cannot be read: {shown(e)}") from e
        if not isinstance(state, dict) or set(cast(Any, state)) != {"anchors", "buffers", "outer"}:
            raise FrameError("a snapshot in the store has other entries")
        found = cast(dict[str, Any], state)
        check_tensors("anchors", found["anchors"], self.anchors)
        check_tensors("buffers", found["buffers"], self._tensor_buffers(), finite=False)
        check_outer(self.outer, found["outer"])
        return found

    def adoption(self, state: Mapping[str, Any], *, mine: Any, buffers: bool) -> Callable[[], None]:
        """Return a function that replaces the anchors by those of a snapshot, and moves the parameters as far.

        Nothing is changed before it is called. After an error, it can be called again.

        Parameters
        ----------
        state : mapping
            Return value of :meth:`parsed`.
        mine : list of list of tensor or None
            Part of this site's changes that the new anchors contain; None: the parameters are set to the anchors.
        buffers : bool
            True: replace the buffers, too.
        """
        before = [[a.detach().clone() for a in f.anchors] for f in self.fragments]
        landing = Landing(self.fragments, [], mine, None, before=before, moved=True)

        @torch.no_grad()
        def apply() -> None:
            self.load_outer(state["outer"])
            masters = self.masters()
            for name, anchor in self.anchors.items():
                anchor.copy_(state["anchors"][name])
            landing.write(masters)
            if buffers:
                for name, x in self._tensor_buffers().items():
                    x.copy_(state["buffers"][name])

        return apply


def _flat(term: MeanTerm) -> torch.Tensor:
    """Return the tensor of a term of a mean."""
    return term.values.tensor if isinstance(term.values, View) else term.values


def _text_digest(lines: Sequence[str]) -> str:
    return digest_of([torch.frombuffer(bytearray("\n".join(lines).encode() + b"\n"), dtype=torch.uint8)])


def check_tensors(part: str, given: Any, expected: Mapping[str, torch.Tensor], *, finite: bool = True) -> None:
    """Raise FrameError unless `given` is a dict of tensors with the names, shapes and dtypes of others."""
    if not isinstance(given, dict) or set(cast(Any, given)) != set(expected):
        raise FrameError(f"{part} of a state in the store are those of another model")
    for name, x in cast(dict[str, Any], given).items():
        like = expected[name]
        if (
            not isinstance(x, torch.Tensor)
            or x.layout != torch.strided
            or x.is_meta
            or (x.shape, x.dtype) != (like.shape, like.dtype)
        ):
            raise FrameError(f"{name!r} in the {part} of a state in the store has another shape or dtype")
        if finite and not bool(x.isfinite().all()):
            raise FrameError(f"{name!r} in the {part} of a state in the store holds NaN or Inf")
