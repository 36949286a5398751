"""Error feedback: add the quantization error of a frame to the next tensor."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, overload

from codec._c.library import ITEMSIZE
from codec._c.traits import is_lossless
from codec._options import CallOptions, settings_of
from codec.arguments import decay_of, shown
from codec.codebook import Codebook
from codec.encoding import encode
from codec.errors import ArgumentError, SpecError
from codec.presets import resolve
from codec.specs import BoundSpec, Preset, Spec
from codec.stateful.checkpoint import ROLES
from codec.stateful.ranges import Array, layout_of
from codec.stateful.resharding import reshard
from codec.stateful.residual_store import ResidualStore, Role
from codec.tensors.view import view
from codec.tensors.wrapper import View


class ErrorFeedback:
    """Residuals of error feedback, stored by parameter and range, independent of buckets.

    For a gradient g and a residual e, the frame of g + e is sent, and the new residual is e' = g + e - decode(frame),
    each sum rounded to float32. Thus the sum of all decoded tensors plus e is the sum of all gradients. Optimizers that
    are linear in the gradient, such as SGD, so receive the full sum of gradients. Adam is not linear: it divides by a
    running magnitude, which includes the quantization error.

    A step calls :meth:`begin`, encodes, and calls :meth:`commit`. Buffers of :meth:`begin` are copies, so
    :meth:`rollback` restores bit-identical residuals after a step that fails on this or another rank. Residuals need 8
    bytes of memory (two float32) per parameter value, or on a server per value that the server owns. Memory is
    allocated only when :meth:`begin` is called with a new layout. An object must not be used by several threads at the
    same time, but several threads may encode slices of one buffer.

    Parameters
    ----------
    spec : Spec or str
        Codec with which :meth:`encode` encodes, or the name of a preset. Buffers of :meth:`begin` can be used with any
        spec. Residuals stay bounded if the codec is a contraction (:attr:`codec.specs.Spec.contraction`). With other
        specs, such as :class:`codec.Ternary`, residuals can grow.
    role : {"worker", "server"}
        "worker": residuals of the gradients that every rank sends. "server": residuals of the reduced gradients, which
        only the owner of a range sends. A two-shot all-reduce that compresses in both directions needs one object of
        each role. The two roles are resharded differently.
    decay : float
        Factor by which a residual is multiplied each time it is added to a gradient, above 0 and at most 1. With a
        factor below 1, old errors fade: SparseLoCo [4]_ uses 0.95 with :class:`codec.TopK`. The sum of the decoded
        tensors then no longer equals the sum of the gradients.

    Raises
    ------
    ArgumentError, SpecError
        The spec is lossless, the role is unknown, or `decay` is out of range.

    References
    ----------
    .. [1] F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
       Training of Speech DNNs", Interspeech 2014.
    .. [2] S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
    .. [3] H. Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
       Compression", ICML 2019: introduces residuals of servers.
    .. [4] A. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706.

    Examples
    --------
    >>> feedback = codec.ErrorFeedback(codec.Sign())
    >>> grad = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    >>> sent = sum(codec.decode(feedback.encode("weight", grad)) for step in range(100))
    >>> bool(np.abs(sent / 100 - grad).mean() < 0.05)
    True

    Encode a bucket of several parameters in two frames. In the next step, the parameters may be in other buckets.

    >>> bucket = np.concatenate([grad, grad])
    >>> error = feedback.begin([("bias", 1000), ("weight", 1000)])
    >>> for part in (slice(0, 500), slice(500, 2000)):
    ...     frame = codec.encode(bucket[part], codec.Sign(), residual=error[part], feedback=True)
    >>> feedback.commit()
    """

    reshard = staticmethod(reshard)

    def __init__(self, spec: Spec | Preset, *, role: Role = "worker", decay: float = 1.0) -> None:
        spec, bound = resolve(spec)
        if bound is not None:
            raise SpecError(
                f"spec must not be bound to an optimizer: pass {spec} to ErrorFeedback, and the bound spec to encode()"
            )
        if is_lossless(spec):
            raise SpecError(f"{type(spec).__name__} has no residual: use error feedback with a lossy spec")
        if not isinstance(role, str) or role not in ROLES:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"role must be one of {', '.join(map(repr, ROLES))}, got {shown(role)}")
        self.spec = spec
        self.role: Role = role
        self._store = ResidualStore(role, decay_of(decay))

    def begin(self, layout: Any) -> Array:
        """Return a copy of the residuals of a bucket, to pass to :func:`codec.encode`, which updates the copy.

        Parameters
        ----------
        layout : View, or iterable of (str, int) or (str, int, int)
            Parts of the bucket in their order: (key, number of values), or (key, start, stop) for a range of a
            parameter's values. Or a view of the bucket whose segments have names.

        Returns
        -------
        numpy.ndarray of float32, shape (number of values,)
            Residuals, multiplied by the decay; 0 for values that have no residual yet. The caller may write to the
            array until :meth:`commit` or :meth:`rollback`, and must not write to it afterwards.

        Raises
        ------
        ArgumentError
            `layout` is not a layout, or contains a parameter value twice.
        StateError
            A parameter value is already in a buffer that was neither committed nor rolled back.
        """
        return self._store.begin(layout)

    def commit(self) -> None:
        """Replace the residuals by the contents of all buffers of :meth:`begin`."""
        self._store.commit()

    def rollback(self) -> None:
        """Drop all buffers of :meth:`begin`, and restore the residuals of the last commit bit for bit."""
        self._store.rollback()

    def pass_on(self, layout: Any, to: "ErrorFeedback", scale: float) -> None:
        """Move residuals of some ranges, multiplied by `scale`, to another object, which adds them to its residuals.

        Use this when ranges that a server owns move to another rank. For a mean over N ranks, a residual r of a server
        has the same effect as a residual N r in the worker object of one rank, so pass ``scale=N``. The move takes
        effect without :meth:`commit`. A :meth:`rollback` of both objects undoes the move, unless one of them was
        committed after the move.

        Parameters
        ----------
        layout : iterable of (str, int) or (str, int, int)
            As for :meth:`begin`.
        to : ErrorFeedback
            Object that receives the residuals.
        scale : float
            Factor by which the residuals are multiplied.

        Raises
        ------
        StateError
            Some of these ranges are in a buffer of :meth:`begin`, of this object or of `to`.
        """
        self._store.pass_on(layout, to._store, scale)

    def settle(self, layout: Any) -> Array:
        """Remove and return the residuals of some ranges, for the caller to apply in another way.

        The removal takes effect without :meth:`commit`. A :meth:`rollback` undoes the removal, unless there was a
        commit in between.

        Parameters
        ----------
        layout : iterable of (str, int) or (str, int, int)
            As for :meth:`begin`.

        Returns
        -------
        numpy.ndarray of float32, shape (number of values,)
            Residuals, as from :meth:`begin`.

        Raises
        ------
        StateError
            Some of these ranges are in a buffer of :meth:`begin`.
        """
        return self._store.settle(layout)

    def rescale(self, scale: float) -> None:
        """Rescale all residuals to match gradients multiplied by `scale`, such as gradients of a scaled loss.

        State dicts contain residuals of unscaled gradients. The change takes effect without :meth:`commit`. A
        :meth:`rollback` undoes the change, unless there was a commit in between.

        Parameters
        ----------
        scale : float
            Factor of the gradients relative to unscaled gradients, from 2^-126 to 2^126; 1 before the first call. A
            power of two changes only exponents, so rescaling back is exact unless a residual overflows or underflows.

        Raises
        ------
        ArgumentError
            `scale`, or its ratio to the previous scale, is not a number from 2^-126 to 2^126.
        StateError
            A buffer of :meth:`begin` is neither committed nor rolled back.
        """
        self._store.rescale(scale)

    @overload
    def encode(
        self,
        key: str,
        x: Any,
        spec: BoundSpec | None = None,
        *,
        out: None = None,
        codebook: Codebook | None = None,
        stream: int = 0,
        options: CallOptions | None = None,
    ) -> bytes: ...
    @overload
    def encode(
        self,
        key: str,
        x: Any,
        spec: BoundSpec | None = None,
        *,
        out: Any,
        codebook: Codebook | None = None,
        stream: int = 0,
        options: CallOptions | None = None,
    ) -> memoryview: ...
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
            Gradient in host memory, of a type that :func:`codec.encode` accepts.
        spec : BoundSpec, optional
            If the spec of this object is :class:`codec.Truncate`: that spec, bound to the optimizer of the next step.
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
            raise SpecError(f"spec must be {self.spec} bound to an optimizer, got {shown(spec)}")
        tensor, dtype = (x.tensor, x.dtype) if type(x) is View else (x, None)
        v, before = view(tensor, dtype), self._store.state
        try:
            at = layout_of([(key, v.nbytes // ITEMSIZE[v.dtype])])
            error = self.begin(at)
            once = replace(settings_of(options), verify_first=False)  # `error` is a copy, dropped after an error
            how: Any = {"out": out, "codebook": codebook, "stream": stream, "options": once}
            bound = self.spec if spec is None else spec
            frame = cast(bytes | memoryview, encode(x, bound, residual=error, feedback=True, **how))
            self._store.commit(at)
        except BaseException:
            self._store.state = before
            raise
        return frame

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all committed residuals.

        Returns
        -------
        dict
            ``version`` (int), ``role`` (str), and for each range an entry ``"key[start:stop]"`` with its residuals, a
            float32 array of shape (stop - start,). Adjacent ranges are merged and entries are sorted, so that the dict
            does not depend on buckets. Buffers of :meth:`begin` are not included.
        """
        return self._store.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace all residuals by those in a state dict. Buffers of :meth:`begin` are dropped.

        Parameters
        ----------
        state_dict : mapping
            Return value of :meth:`state_dict`, or an item of the list that :meth:`reshard` returns. If it was saved to
            a file and loaded again, arrays may be torch tensors, and ints and strings numpy arrays of shape (). Arrays
            are copied.

        Raises
        ------
        StateError
            `state_dict` is not a state dict, has another role or version, or contains NaN or Inf. The residuals are
            unchanged.
        """
        self._store.load_state_dict(state_dict)
