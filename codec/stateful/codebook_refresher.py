"""A codebook that all ranks agree on, and that follows what they send."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from codec._c import library
from codec.arguments import shown, whole
from codec.codebook import Codebook, count_symbols
from codec.errors import ArgumentError, SpecError, StateError
from codec.specs import BoundSpec, Lossless, Truncate
from codec.stateful.checkpoint import VERSION, array_of, opened, plain
from codec.tensors.view import dtype_name

Counts = np.ndarray[Any, np.dtype[np.int64]]

_DEFAULT = Lossless()
_LEAST = 512  # smaller tensors ignore a codebook
_NAMED = 17  # bytes of Codebook.to_bytes that are not its code lengths, and of a frame that names it
_STEPS = (1 << 62) - 1
_MAX_COUNT = 1 << 53  # of a symbol or of bits, on one rank; int64 holds the sum over any number of ranks

_ENTRIES = ("version", "symbols", "latest", "counts")  # of a state, beside its codebooks
_BOOK = re.compile(r"book\[([0-9]{1,19})\]")


class CodebookRefresher:
    """Codebooks made of what all ranks send, from time to time, without a wait and without a word about the switch.

    Each rank counts symbols of what it encodes. In every step for which :meth:`due` says so counts are summed over
    ranks, which may go on beside the next `delay` steps. From the sums every rank makes the same codebook, in use from
    the step + `delay` on. The one before is kept until the next, for frames that are still on their way: frames name
    theirs by its id. All decisions are made from steps and sums alone.

    There is a codebook only if it pays: if all values of the sums cost fewer bits with it than with those that frames
    bring along, each made for its tensor. It does where tensors are many, small and alike. Gradients of different
    layers are not: they are smaller with codebooks of their own.

    Parameters
    ----------
    spec : Lossless or Truncate
        Spec of the frames.
    dtype : str, type or dtype
        Of the tensors; for Lossless any that has exponents will do.
    interval : int
        Steps between sums, more than `delay`.
    delay : int
        Steps from counts to the codebook that is made of them: how long summing may take.

    Raises
    ------
    ArgumentError, SpecError
        A spec or dtype without exponents, or `interval` and `delay` that do not go together.

    References
    ----------
    .. [1] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024: its
       asynchronous reduction of histograms.

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
        self._latest = -1  # step that current() was asked about
        self._books: dict[int, Codebook | None] = {0: None}  # by the step from which they are in use, the last two

    def count(self, x: Any, spec: BoundSpec | None = None) -> None:
        """Count the symbols of a tensor, in the sample that encoding takes.

        It is enough to count in steps that are :meth:`due`: for a small tensor it takes longer than encoding. Under
        error feedback the gradient will do for its sum with the residual.

        Parameters
        ----------
        x : array, tensor or View
            Tensor that is to be encoded.
        spec : BoundSpec, optional
            The refresher's spec, bound to an optimizer, if it is :class:`codec.Truncate`.

        Raises
        ------
        ArgumentError, EngineError, StateError
            As in :meth:`Codebook.from_tensors`, or x has other symbols than tensors of `dtype`. Counts are as before.
        """
        if spec is not None and (not isinstance(spec, BoundSpec) or spec.spec != self.spec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(f"spec must be {self.spec} bound to an optimizer, got {shown(spec)}")
        dtype, n, sample = count_symbols(x, self.spec if spec is None else spec)
        own = Codebook.from_counts(sample, self.spec, dtype)
        if own.symbols != self._symbols:
            raise ArgumentError(f"under {self.spec} tensors of {dtype} have other symbols than those of {self.dtype}")
        if n < _LEAST or not (taken := int(sample.sum())):
            return
        counts = sample * n // taken  # values: tensors of which a smaller part is looked at count no less
        bits = min(self._bits(own, counts) + 8 * (len(own.to_bytes()) - _NAMED), 8 * n)
        self._counts += np.append(counts, bits)

    def _bits(self, book: Codebook, counts: Counts) -> int:
        lengths = np.frombuffer(book.lengths, np.uint8).astype(np.int64)
        return int(counts @ np.where(lengths, lengths, book.escape_length + self._literal))

    def due(self, step: int) -> bool:
        """Are counts to be summed in this step? In every `interval`-th one, but not in step 0."""
        return step > 0 and step % self.interval == 0

    def counts(self) -> Counts:
        """What this rank has counted since the last codebook was proposed, to be summed over ranks.

        Returns
        -------
        numpy.ndarray of int64, shape (257,)
            How many values have each symbol, and how many bits they cost with codebooks of their own. A copy.
        """
        return self._counts.copy()

    def propose(self, step: int, summed_counts: Any) -> None:
        """Make the codebook that is in use from `step` + `delay` on, or decide that there is none.

        Every rank must do so, with the same arguments, before it asks for the codebook of that step. Counting begins
        anew: what was counted while sums were made is dropped.

        Parameters
        ----------
        step : int
            Of the counts.
        summed_counts : array or tensor of int64, shape (257,)
            The sum over ranks of :meth:`counts` in that step.

        Raises
        ------
        ArgumentError
            Not a step, or not such counts.
        StateError
            Too late: this rank has been told another codebook for a step in which the new one is in use. Or too early,
            while one that was proposed before is not yet in use. All is as it was.
        """
        step = whole("step", step, 0, _STEPS - self.delay)
        try:
            sums = array_of("summed_counts", summed_counts, "int64")
        except StateError as e:
            raise ArgumentError(str(e)) from None
        if sums.shape != (257,) or (sums < 0).any():
            raise ArgumentError("summed_counts must be 257 integers, none below 0")
        switch, (at, last) = step + self.delay, next(reversed(self._books.items()))
        if switch <= self._latest:
            raise StateError(
                f"the codebook of step {step} was proposed too late: from step {switch} on it is in use, "
                f"and this rank has asked for that of step {self._latest}"
            )
        if step < at:
            raise StateError(f"the codebook of step {step} was proposed before the last one is in use, at step {at}")
        book = Codebook.from_counts(sums[:256], self.spec, self.dtype)
        chosen = book if self._bits(book, sums[:256]) < sums[256] else None
        if chosen != last:
            self._books = {at: last, switch: chosen}
        self._counts = np.zeros(257, np.int64)

    def current(self, step: int) -> Codebook | None:
        """The codebook with which all ranks encode in a step, if there is one.

        Raises
        ------
        StateError
            The step is before those that the last two codebooks are for.
        """
        *_, book = self._until(step).values()
        self._latest = max(self._latest, step)
        return book

    def _until(self, step: int) -> dict[int, Codebook | None]:
        """Codebooks that a step knows."""
        step = whole("step", step, 0, _STEPS)
        if not (found := {at: book for at, book in self._books.items() if at <= step}):
            raise StateError(f"the codebook of step {step} is no longer known: only the last two are")
        return found

    @property
    def books(self) -> tuple[Codebook, ...]:
        """Those that frames may name, for ``codebooks=``: the last one, also before its step, and the one before."""
        return tuple(book for book in self._books.values() if book is not None)

    def rollback(self, step: int) -> None:
        """Forget codebooks that a step, which is to be tried again, does not know yet, and all counts.

        After a failure some ranks may have a sum that others did not get. If all roll back to the same step they agree.
        A sum that was under way is made anew or left out, on all ranks alike.

        Raises
        ------
        StateError
            The step is before those that the last two codebooks are for.
        """
        self._books = self._until(step)
        self._latest = min(self._latest, step)
        self._counts = np.zeros(257, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Codebooks, with the steps from which they are in use, and counts.

        Returns
        -------
        dict
            ``version``, ``symbols`` (what they are), ``latest`` (step), ``counts`` (int64 of shape (257,)) and, for
            one or two steps, ``"book[step]"`` with a codebook's bytes, uint8, none if there is no codebook. All ranks
            have the same ones, but for counts: a new rank may load any other's.
        """
        books = {f"book[{at}]": book.to_bytes() if book else b"" for at, book in self._books.items()}
        return {
            "version": VERSION,
            "symbols": self._symbols,
            "latest": self._latest,
            "counts": self._counts.copy(),
            **{name: np.frombuffer(data, np.uint8).copy() for name, data in books.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict.

        Parameters
        ----------
        state_dict : mapping
            Return value of :meth:`state_dict`, maybe saved to a file and loaded since. It is copied.

        Raises
        ------
        StateError
            `state_dict` is not a state dict, is of another version or of another spec's symbols, or has a number out of
            range. The refresher keeps its state.
        """
        entries = opened(state_dict)
        symbols, latest = plain(entries, "symbols", int), plain(entries, "latest", int)
        if not -1 <= latest <= _STEPS:
            raise StateError(f"'latest' must be a step from -1 to {_STEPS}, got {shown(latest)}")
        if symbols != self._symbols:
            raise StateError(f"these counts are of other symbols than those of {self.spec} and {self.dtype}")
        counts = array_of("counts", entries.get("counts"), "int64")
        books = {_step(name): _book(name, entries[name]) for name in entries if name not in _ENTRIES}
        if len(counts) != 257 or (counts < 0).any() or (counts > _MAX_COUNT).any():
            raise StateError(f"'counts' must be 257 integers from 0 to {_MAX_COUNT}")
        if len(entries) != len(_ENTRIES) + len(books) or len(books) not in (1, 2):
            raise StateError(f"a state has codebooks of one step or two, this one of {len(books)}")
        if any(book is not None and book.symbols != symbols for book in books.values()):
            raise StateError(f"these codebooks are of other symbols than those of {self.spec} and {self.dtype}")
        self._counts, self._latest, self._books = counts, latest, dict(sorted(books.items()))


def _step(name: object) -> int:
    """Return the step of an entry "book[step]"."""
    found = _BOOK.fullmatch(name) if isinstance(name, str) else None
    if found is None or int(found[1]) > _STEPS:
        raise StateError(f"this state has an entry {shown(name)}, which is not book[step] with a step up to {_STEPS}")
    return int(found[1])


def _book(name: str, value: Any) -> Codebook | None:
    """Return the codebook of an entry; None if the entry has no bytes."""
    data = array_of(name, value, "uint8")
    try:
        return Codebook.from_bytes(data) if len(data) else None
    except ArgumentError as e:
        raise StateError(f"{name}: {e}") from None
