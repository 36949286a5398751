"""Error feedback: what a lossy frame loses is sent with the next one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from codec._c.library import ITEMSIZE
from codec._options import CallOptions, settings_of
from codec.arguments import plain
from codec.arguments import shown as told
from codec.codebook import Codebook
from codec.encoding import encode
from codec.errors import ArgumentError, SpecError, StateError
from codec.presets import resolve
from codec.specs import BoundSpec, Lossless, Spec
from codec.stateful.checkpoint import ROLES, load, save
from codec.stateful.ranges import (
    Array,
    Layout,
    Store,
    forget_nobodys,
    gather,
    layout_of,
    numel,
    scaled,
    shared,
    shown,
    union,
    without,
)
from codec.stateful.resharding import reshard
from codec.tensors.view import view
from codec.tensors.wrapper import View

Role = Literal["worker", "server"]


class _Now(NamedTuple):
    """All that there is, replaced as a whole: nothing that interrupts can leave half of a step."""

    kept: Store  # what is owed
    pending: Store  # what will be, once it is committed
    spare: Store  # memory for the next pending ones
    scale: float = 1.0  # of all of them
    before: "_Now | None" = None  # all this before some of it was settled or scaled, until something is committed

    def changed(self, kept: Store, scale: float) -> "_Now":
        """The same with something else owed."""
        return _Now(kept, self.pending, {}, scale, self if self.before is None else self.before)


class ErrorFeedback:
    """Residuals by parameter and range, whatever buckets the parameters come in.

    A frame of g + e is sent, and e becomes what that frame loses: e' = g + e - decode(frame), each sum rounded to
    float32. So the sum of all that was decoded, and e, is the sum of all g. That holds for what is done with sums and
    means of gradients, such as SGD's step, not through Adam's, which divides by a magnitude that the error is part of.

    Begin, encode, commit: what is begun is a copy, so that a step that fails, or that another rank refuses, is rolled
    back to the bit. It takes 8 bytes a value (twice 4 bytes; for a server's ranges: of those that it owns), and memory
    is allocated only when a layout is new. Not for several threads at once, but slices of one buffer may be encoded in
    several.

    Parameters
    ----------
    spec : Spec
        The codec of :meth:`encode`; buffers of :meth:`begin` can be used with any. Residuals stay bounded for
        contractions (:attr:`codec.specs.Spec.contraction`): with others, such as :class:`codec.Ternary`, they can grow.
    role : {"worker", "server"}
        Whether residuals are of what every rank sends of its own, or of what the only owner of a range sends of the
        reduced gradients. A two-shot all-reduce that compresses both ways has one of each. They reshard differently.

    Raises
    ------
    ArgumentError, SpecError
        The spec loses nothing, or there is no such role.

    References
    ----------
    .. [1] F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
       Training of Speech DNNs", Interspeech 2014.
    .. [2] S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
    .. [3] H. Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
       Compression", ICML 2019: the server's.

    Examples
    --------
    >>> feedback = codec.ErrorFeedback(codec.Sign())
    >>> grad = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    >>> sent = sum(codec.decode(feedback.encode("weight", grad)) for step in range(100))
    >>> bool(np.abs(sent / 100 - grad).mean() < 0.05)
    True

    A bucket of several parameters, in two frames; its parameters may come in other buckets the next time.

    >>> bucket = np.concatenate([grad, grad])
    >>> error = feedback.begin([("bias", 1000), ("weight", 1000)])
    >>> for part in (slice(0, 500), slice(500, 2000)):
    ...     frame = codec.encode(bucket[part], codec.Sign(), residual=error[part], feedback=True)
    >>> feedback.commit()
    """

    reshard = staticmethod(reshard)

    def __init__(self, spec: Spec | str, *, role: Role = "worker") -> None:
        spec, bound = resolve(spec)
        if bound is not None:
            raise SpecError(f"ErrorFeedback takes {spec}: give the spec that is bound to its method encode()")
        if isinstance(spec, Lossless):
            raise SpecError("Lossless loses nothing that could be fed back")
        if not isinstance(role, str) or role not in ROLES:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"role must be one of {ROLES}, got {told(role)}")
        self.spec = spec
        self.role: Role = role
        self._now = _Now({}, {}, {})

    def begin(self, layout: Any) -> Array:
        """Residuals of a bucket, to be given to :func:`codec.encode` and then committed or rolled back.

        Parameters
        ----------
        layout : iterable of (str, int) or (str, int, int)
            What the bucket is made of, in its order: (key, number of values), or (key, start, stop) for a range of a
            parameter's values.

        Returns
        -------
        numpy.ndarray of float32
            Flat: what each value is still owed, zeros for those not seen before. It is the caller's to change, in
            parts or whole, until :meth:`commit` or :meth:`rollback`, and not afterwards.

        Raises
        ------
        ArgumentError
            It is not a layout, or has a value twice.
        StateError
            A value has been begun already, and neither committed nor rolled back.
        """
        at, now = layout_of(layout), self._now
        new = at not in now.kept
        # layouts that are kept have nothing in common
        others = now.pending if new else [other for other in now.pending if other == at or other not in now.kept]
        if others and (begun := shared(r for other in (at, *others) for r in other)):
            raise StateError(f"{shown(begun)} has been begun, and neither committed nor rolled back")
        if new:
            buffer = gather(now.kept, at)
        else:
            buffer = now.spare[at] if at in now.spare else np.empty(numel(at), np.float32)
            np.copyto(buffer, now.kept[at])
            forget_nobodys(buffer, at)
        self._now = now._replace(pending={**now.pending, at: buffer})
        return buffer

    def commit(self) -> None:
        """Make all that was begun what is owed from now on."""
        self._commit(self._now.pending)

    def rollback(self) -> None:
        """Forget all that was begun: what is owed is, to the bit, what it was before."""
        now = self._now
        before = now if now.before is None else now.before
        again = {at: buffer for at, buffer in {**now.spare, **now.pending}.items() if at in before.kept}
        self._now = _Now(before.kept, {}, again, before.scale)

    def pass_on(self, layout: Any, to: "ErrorFeedback", scale: float) -> None:
        """Have another one owe what is owed to some ranges here, times `scale`, from now on.

        For a server whose ranges go to another rank: a residual of a mean is owed as well by a worker of this rank, as
        many times as there are ranks. Nothing is lost, so that this needs no commit; but a :meth:`rollback` of both
        takes it back, unless something was committed meanwhile.

        Parameters
        ----------
        layout : iterable of (str, int) or (str, int, int)
            As for :meth:`begin`.
        to : ErrorFeedback
            Who owes it then.
        scale : float
            What residuals are multiplied by.

        Raises
        ------
        StateError
            Some of these ranges have been begun, here or there.
        """
        at = layout_of(layout)
        to._refuse_begun(at)
        values = self.settle(at) * np.float32(scale * to._now.scale / self._now.scale)
        if values.any():
            values += gather(to._now.kept, at)
            to._now = to._now.changed({**without(to._now.kept, [at]), at: values}, to._now.scale)

    def settle(self, layout: Any) -> Array:
        """What is owed to some ranges, for the caller to pay in another way: nothing is owed to them from now on.

        This needs no commit; but a :meth:`rollback` takes it back, unless something was committed meanwhile.

        Parameters
        ----------
        layout : iterable of (str, int) or (str, int, int)
            As for :meth:`begin`.

        Returns
        -------
        numpy.ndarray of float32
            Flat, as from :meth:`begin`.

        Raises
        ------
        StateError
            Some of these ranges have been begun.
        """
        at, now = layout_of(layout), self._now
        self._refuse_begun(at)
        values = gather(now.kept, at)
        if values.any():
            self._now = now.changed(without(now.kept, [at]), now.scale)
        return values

    def rescale(self, scale: float) -> None:
        """Go on with gradients that are multiplied by `scale`, as those of a scaled loss are: so is what they are owed.

        States hold what gradients are owed that are not scaled. This needs no commit; but a :meth:`rollback` takes it
        back, unless something was committed meanwhile.

        Parameters
        ----------
        scale : float
            From 2^-126 to 2^126; before the first call it is 1. Powers of two change no residual's bits.

        Raises
        ------
        ArgumentError
            It is not such a number, or farther than that from the one before.
        StateError
            Something has been begun.
        """
        now, number = self._now, plain(scale)
        # beyond, float32 has no factor or its inverse: residuals would come back as others, or not at all
        if isinstance(number, bool) or not isinstance(number, int | float) or not 2.0**-126 <= number <= 2.0**126:
            raise ArgumentError(f"a scale must be a number from 2^-126 to 2^126, got {told(scale)}")
        if not 2.0**-126 <= number / now.scale <= 2.0**126:
            raise ArgumentError(
                f"residuals of scale {now.scale!r} cannot be those of {told(scale)}: float32 has no factor"
            )
        if now.pending:
            raise StateError(
                "residuals cannot be rescaled while some have been begun, and not committed nor rolled back"
            )
        if number != now.scale:
            self._now = now.changed(scaled(now.kept, number / now.scale), float(number))

    def encode(
        self,
        key: str,
        x: Any,
        spec: BoundSpec | None = None,
        *,
        out: Any = None,
        codebook: Codebook | None = None,
        stream: int = 0,
        options: CallOptions | None = None,
    ) -> bytes | memoryview:
        """Encode a parameter's gradient with error feedback, and commit its residual.

        Buffers of :meth:`begin` are not affected.

        Parameters
        ----------
        key : str
            Name of the parameter.
        x : array, tensor, buffer or View
            Gradient, as in :func:`codec.encode`, in host memory.
        spec : BoundSpec, optional
            The spec of this object, bound to the optimizer of the next step, if it is :class:`codec.Truncate`.
        out, codebook, stream, options
            As in :func:`codec.encode`.

        Returns
        -------
        bytes, or memoryview of ``out``
            The frame.

        Raises
        ------
        ArgumentError, EngineError, StateError
            As in :func:`codec.encode` and :meth:`begin`. The residual is unchanged.
        """
        if spec is not None and (not isinstance(spec, BoundSpec) or spec.spec != self.spec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(f"spec must be {self.spec} bound to an optimizer, got {told(spec)}")
        tensor, dtype = (x.tensor, x.dtype) if type(x) is View else (x, None)
        v, before = view(tensor, dtype), self._now
        try:
            at = layout_of([(key, v.nbytes // ITEMSIZE[v.dtype])])
            error = self.begin(at)
            once = replace(settings_of(options), verify_first=False)  # `error` is a copy
            how: Any = {"out": out, "codebook": codebook, "stream": stream, "options": once}
            frame = encode(x, self.spec if spec is None else spec, residual=error, feedback=True, **how)
            self._commit({at: error})
        except BaseException:
            self._now = before
            raise
        return frame

    def state_dict(self) -> dict[str, Any]:
        """What is owed, and to whom.

        Returns
        -------
        dict
            ``version``, ``role`` and, for each range, ``"key[start:stop]"`` with a copy of its residuals, float32 of
            shape (stop - start,). Ranges are the longest there are, in order: buckets leave no trace. What is begun
            and not committed is not in it.
        """
        return save(self.role, scaled(self._now.kept, 1 / self._now.scale))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Owe what a state dict says instead of what is owed now; what was begun is forgotten.

        Parameters
        ----------
        state_dict : mapping
            What :meth:`state_dict` or :meth:`reshard` gave, also after a way through a file: of torch tensors, or of
            numpy's arrays where there were ints and strings. It is copied.

        Raises
        ------
        StateError
            It is not a state dict, is of another role or version, or holds NaN or Inf. All is as it was.
        """
        role, store = load(state_dict)
        if role != self.role:
            raise StateError(f"these are residuals of a {role}, not of a {self.role}")
        self._now = _Now(store, {}, {})

    def _commit(self, begun: Store) -> None:
        now = self._now
        kept = now.kept
        if new := begun.keys() - kept.keys():
            kept = without(kept, new)  # parameters that are in other buckets now
        pending = {at: buffer for at, buffer in now.pending.items() if at not in begun}
        spare = {**now.spare, **{at: now.kept[at] for at in begun if at in kept}}
        spare = {at: array for at, array in spare.items() if at in kept}
        self._now = _Now({**kept, **begun}, pending, spare, now.scale)

    def _refuse_begun(self, at: Layout) -> None:
        begun = union(r for other in self._now.pending for r in other)
        if (twice := shared([*union(at), *begun])) is not None:
            raise StateError(f"{shown(twice)} has been begun, and neither committed nor rolled back")
