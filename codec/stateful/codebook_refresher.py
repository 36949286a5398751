"""Codebooks that all ranks share, rebuilt periodically from symbol counts of the tensors that ranks send."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from codec._c import library
from codec.arguments import shown, whole
from codec.codebook import Codebook, Counts, count_symbols
from codec.errors import ArgumentError, SpecError, StateError
from codec.specs import BoundSpec, Lossless, Truncate
from codec.stateful.schema import REST, Field, Schema, array, number, read_field
from codec.tensors.view import dtype_name

_DEFAULT = Lossless()
_LEAST = 512  # number of values below which the codec ignores codebooks
_NAMED = 17  # bytes of Codebook.to_bytes besides code lengths; a frame refers to a codebook in as many bytes
_STEPS = (1 << 62) - 1  # highest step number
_COUNTS = array("int64", 0, 257)
_MAX_COUNT = 1 << 53  # maximum of each count on one rank, so that the sum over 1,000 ranks fits int64


class CodebookRefresher:
    """Refresh a shared codebook periodically, without waiting and without messages that announce the new codebook.

    Each rank counts the symbols of the tensors that it encodes. In every step for which :meth:`due` returns True, the
    caller sums the counts over all ranks. This all-reduce may overlap with the next `delay` steps. Every rank builds
    the same codebook from the sums, and starts to use it `delay` steps after the step of the counts. Frames refer to
    their codebook by id, so the previous codebook is kept for frames in flight. Decisions depend only on steps and
    sums, so all ranks agree.

    A shared codebook is used only if all counted values together need fewer bits with it than with a separate codebook
    in each frame. It saves bits if there are many small and similar tensors. Gradients of different layers are not
    similar, and their frames are smaller with separate codebooks.

    Parameters
    ----------
    spec : Lossless or Truncate
        Spec of the frames.
    dtype : str, type or dtype
        Dtype of the tensors. For Lossless, any dtype with exponents gives the same symbols.
    interval : int
        Number of steps between two refreshes, more than `delay`.
    delay : int
        Number of steps from the counts to the first use of the codebook, at least 1. The all-reduce of the counts must
        end within these steps.

    Raises
    ------
    ArgumentError, SpecError
        The spec or dtype has no exponents, `delay` is below 1, or `interval` is not above `delay`.

    References
    ----------
    .. [1] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024: describes
       the asynchronous reduction of histograms.

    Examples
    --------
    >>> refresher = codec.CodebookRefresher(interval=4, delay=2)
    >>> grads = np.random.default_rng(0).standard_normal((8, 10, 1000)).astype(np.float32)
    >>> for step, bucket in enumerate(grads):
    ...     if refresher.due(step):
    ...         for x in bucket:
    ...             refresher.count(x)
    ...         sums = refresher.counts() * 2  # in place of an all-reduce over two ranks
    ...     if refresher.due(step - 1):
    ...         refresher.propose(step - 1, sums)
    ...     for x in bucket:
    ...         frame = codec.encode(x, codebook=refresher.current(step))
    >>> refresher.current(5) is None, codec.inspect(frame).codebook_id == refresher.current(6).id
    (True, True)
    >>> bool((codec.decode(frame, codebooks=refresher.books) == x).all())
    True
    """

    def __init__(
        self, spec: Lossless | Truncate = _DEFAULT, dtype: Any = "float32", *, interval: int = 50, delay: int = 10
    ) -> None:
        self.spec = spec
        self.dtype = dtype_name(dtype)
        self.delay = whole("delay", delay, 1, _STEPS)
        self.interval = whole("interval", interval, self.delay + 1, _STEPS)
        self._symbols = Codebook.from_counts(np.zeros(256, int), spec, dtype).symbols
        joint = self._symbols in (library.lib.CODEC_SYMBOLS_JOINT, library.lib.CODEC_SYMBOLS_JOINT16)
        self._literal = 16 if joint else 8
        self._counts: Counts = np.zeros(257, np.int64)
        self._latest = -1  # highest step for which current() was called
        self._books: dict[int, Codebook | None] = {0: None}  # the last two codebooks, by the first step of their use

    def count(self, x: Any, spec: BoundSpec | None = None) -> None:
        """Count the symbols of a tensor, in the same sample of its values that encoding uses.

        Call this only in steps for which :meth:`due` returns True: for a small tensor, counting takes longer than
        encoding. With error feedback, pass the gradient; its symbols approximate the symbols of gradient + residual.

        Parameters
        ----------
        x : array, tensor or View
            Tensor to be encoded.
        spec : BoundSpec, optional
            The refresher's spec, bound to an optimizer, if it is :class:`codec.Truncate`.

        Raises
        ------
        ArgumentError, EngineError, StateError
            As in :meth:`Codebook.from_tensors`; or the symbols of x are not of the kind that `dtype` has. The counts
            are unchanged.
        """
        if spec is not None and (not isinstance(spec, BoundSpec) or spec.spec != self.spec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(f"spec must be {self.spec} bound to an optimizer, got {shown(spec)}")
        dtype, n, sample = count_symbols(x, self.spec if spec is None else spec)
        own = Codebook.from_counts(sample, self.spec, dtype)
        if own.symbols != self._symbols:
            raise ArgumentError(
                f"x of {dtype} has other symbols with {self.spec} than {self.dtype}, the dtype of this refresher: make "
                "a refresher for each dtype"
            )
        if n < _LEAST or not (taken := int(sample.sum())):
            return
        counts = sample * n // taken  # extrapolate the counts to all n values: sampling rates of tensors differ
        bits = min(self._bits(own, counts) + 8 * (len(own.to_bytes()) - _NAMED), 8 * n)
        self._counts += np.append(counts, bits)

    def _bits(self, book: Codebook, counts: Counts) -> int:
        """Return the number of bits that the counted symbols need with a codebook."""
        lengths = np.frombuffer(book.lengths, np.uint8).astype(np.int64)
        return int(counts @ np.where(lengths, lengths, book.escape_length + self._literal))

    def due(self, step: int) -> bool:
        """Return True if counts must be summed in this step: in every `interval`-th step, except step 0."""
        return step > 0 and step % self.interval == 0

    def counts(self) -> Counts:
        """Return this rank's counts since the last call of :meth:`propose`, to be summed over all ranks.

        Returns
        -------
        numpy.ndarray of int64, shape (257,)
            Copy of the counts: the number of values by symbol (256 items), then the number of bits that these values
            need with a separate codebook for each tensor.
        """
        return self._counts.copy()

    def propose(self, step: int, summed_counts: Any) -> None:
        """Build the codebook for `step` + `delay` and later steps, or decide that these steps use none.

        Every rank must call this with equal arguments, before it calls :meth:`current` for step `step` + `delay`.
        Counts restart at 0, so symbols that were counted during the all-reduce are dropped.

        Parameters
        ----------
        step : int
            Step in which :meth:`counts` was called.
        summed_counts : array or tensor of int64, shape (257,)
            Sum over all ranks of :meth:`counts` in that step.

        Raises
        ------
        ArgumentError
            `step` is not a valid step number, or `summed_counts` are not 257 non-negative integers.
        StateError
            The call is too late: :meth:`current` was already called for step `step` + `delay` or a later one. Or the
            call is too early: the previous codebook is not yet in use in `step`. The refresher is unchanged.
        """
        step = whole("step", step, 0, _STEPS - self.delay)
        try:
            sums = read_field("summed_counts", "pass the sum of counts() over all ranks", _COUNTS, summed_counts)
        except StateError as e:
            raise ArgumentError(str(e)) from None
        switch, (at, last) = step + self.delay, next(reversed(self._books.items()))
        if switch <= self._latest:
            raise StateError(
                f"propose() was called too late: the codebook of step {step} is for steps from {switch} on, but "
                f"current() was already called for step {self._latest}"
            )
        if step < at:
            raise StateError(
                f"propose() was called too early, in step {step}: the previous codebook is in use only from step {at} "
                "on"
            )
        book = Codebook.from_counts(sums[:256], self.spec, self.dtype)
        chosen = book if self._bits(book, sums[:256]) < sums[256] else None
        if chosen != last:
            self._books = {at: last, switch: chosen}
        self._counts = np.zeros(257, np.int64)

    def current(self, step: int) -> Codebook | None:
        """Return the codebook with which all ranks must encode in a step; None: encode without a shared codebook.

        Raises
        ------
        StateError
            The step is earlier than the first use of the last two codebooks.
        """
        *_, book = self._until(step).values()
        self._latest = max(self._latest, step)
        return book

    def _until(self, step: int) -> dict[int, Codebook | None]:
        """Return the codebooks whose use begins at `step` or earlier, by the first step that uses them."""
        step = whole("step", step, 0, _STEPS)
        if not (found := {at: book for at, book in self._books.items() if at <= step}):
            raise StateError(
                f"the codebook of step {step} is no longer stored, since only the last two codebooks are kept"
            )
        return found

    @property
    def books(self) -> tuple[Codebook, ...]:
        """Codebooks to pass as ``codebooks=`` for decoding: the last two, including one that is not in use yet."""
        return tuple(book for book in self._books.values() if book is not None)

    def rollback(self, step: int) -> None:
        """Drop all counts, and the codebooks whose use begins after `step`, so that the step can be repeated.

        After a failure, some ranks may have received sums that others did not receive. Ranks agree again once all of
        them have rolled back to the same step. An all-reduce that was in flight must be repeated on all ranks or on
        none.

        Parameters
        ----------
        step : int
            Step to repeat.

        Raises
        ------
        StateError
            The step is earlier than the first use of the last two codebooks.
        """
        self._books = self._until(step)
        self._latest = min(self._latest, step)
        self._counts = np.zeros(257, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return the codebooks, the steps of their first use, and the counts.

        Returns
        -------
        dict
            ``format`` (str), ``version`` and ``symbols`` (int, ``CODEC_SYMBOLS_*``), ``latest`` (int, highest step so
            far), ``counts`` (int64 of shape (257,)), and one or two entries ``"book[step]"``: the bytes (uint8) of the
            codebook that is used from that step on, empty if none is used. All entries except ``counts`` are equal on
            all ranks, so a new rank may load the state dict of any other rank.
        """
        books = {f"book[{at}]": book.to_bytes() if book else b"" for at, book in self._books.items()}
        return _STATE.save(
            {
                "symbols": self._symbols,
                "latest": self._latest,
                "counts": self._counts.copy(),
                **{name: np.frombuffer(data, np.uint8).copy() for name, data in books.items()},
            }
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict.

        Parameters
        ----------
        state_dict : mapping
            Return value of :meth:`state_dict`, possibly saved to a file and loaded again. Arrays are copied.

        Raises
        ------
        StateError
            `state_dict` is not a state dict, has another version, has the symbols of another spec, or contains a number
            out of range. The refresher is unchanged.
        """
        entries = _STATE.read(state_dict)
        symbols, counts = entries["symbols"], entries["counts"]
        books: dict[int, Codebook | None] = {int(name[1]): book for name, book in entries[REST]}
        if symbols != self._symbols:
            raise StateError(
                f"the counts of this state dict are for other symbols than {self.spec} of {self.dtype} has: load the "
                "state of a refresher with the same spec and dtype"
            )
        if (counts > _MAX_COUNT).any() or max(books, default=0) > _STEPS:
            raise StateError(
                f"a count of this state dict is above {_MAX_COUNT}, or a step above {_STEPS}: the state is damaged"
            )
        if len(entries[REST]) != len(books) or len(books) not in (1, 2):
            raise StateError(f"this state dict must have the codebooks of one or two steps, got {len(books)} codebooks")
        if any(book is not None and book.symbols != symbols for book in books.values()):
            raise StateError(
                f"a codebook of this state dict is for other symbols than {self.spec} has with {self.dtype}: the state "
                "is damaged"
            )
        self._counts, self._latest, self._books = counts, entries["latest"], dict(sorted(books.items()))


def _book(value: Any) -> Codebook | None:
    """Return the codebook of an entry; None if the entry has no bytes."""
    data = array("uint8").read(value)
    return Codebook.from_bytes(data) if len(data) else None


_STATE = Schema(
    "CodebookRefresher",
    {"symbols": number(0, 1 << 30), "latest": number(-1, _STEPS), "counts": _COUNTS},
    (re.compile(r"book\[([0-9]{1,19})\]"), Field("the bytes of a codebook", _book)),
)
