"""Checks that the outputs of a call share no memory with inputs or other outputs."""

import bisect
import itertools
from collections.abc import Iterable

from codec.errors import ArgumentError
from codec.tensors.view import TensorView


def check_apart(name: str, written: TensorView, others: Iterable[tuple[str, TensorView, bool]]) -> None:
    """Raise ArgumentError if a tensor that will be written shares memory with another tensor.

    Parameters
    ----------
    name : str
        Name of the argument to be written, for messages.
    written : TensorView
        View of that argument.
    others : iterable of (str, TensorView, bool)
        Name and view of each other argument, and True if this argument may be the same array as `written`.
    """
    begin = written.address
    for other, v, same in others:
        at = v.address
        if begin < at + v.nbytes and at < begin + written.nbytes:
            if same and at == begin and v.nbytes == written.nbytes and v.dtype == written.dtype:
                continue
            but = f" without being {other} itself" if same else ": pass memory of its own"
            raise ArgumentError(f"{name} shares memory with {other}{but}")


def check_iterated(name: str, given: object, views: Iterable[TensorView]) -> None:
    """Raise ArgumentError if `given` is an iterator whose items share memory, which later items have overwritten.

    Parameters
    ----------
    name : str
        Name of the argument, for messages.
    given : object
        Argument, which was read to its end.
    views : iterable of TensorView
        Views of its items. Items of type bytes, which cannot be overwritten, may be the same object.
    """
    if not hasattr(given, "__next__"):
        return
    spans = sorted((v.address, v.address + v.nbytes, i) for i, v in enumerate(views) if type(v.owner) is not bytes)
    for (_, end, i), (begin, _, j) in itertools.pairwise(span for span in spans if span[0] < span[1]):
        if begin < end:
            raise ArgumentError(
                f"items {min(i, j)} and {max(i, j)} of the iterator {name} share memory, so that one may have replaced "
                "the other: yield a copy of each, or pass a list of tensors that all exist"
            )


def check_all_apart(
    name: str, written: Iterable[tuple[int, TensorView]], read: Iterable[tuple[int, TensorView]]
) -> None:
    """Raise ArgumentError if an output of a batch shares memory with another output or another item's input.

    Parameters
    ----------
    name : str
        Name of the argument to be written, for messages.
    written, read : iterable of (int, TensorView)
        For each output and each input, the index of its item in the batch, and its view. An input and an output of the
        same item may share memory.
    """
    spans = sorted((v.address, v.address + v.nbytes, i) for i, v in written if v.nbytes)
    for (_, end, i), (begin, _, j) in itertools.pairwise(spans):
        if begin < end:
            raise ArgumentError(
                f"{name} of items {min(i, j)} and {max(i, j)} shares memory: pass separate memory for each"
            )
    ends = [end for _, end, _ in spans]
    for i, v in read:
        begin = v.address
        k = bisect.bisect_right(ends, begin)
        while k < len(spans) and spans[k][0] < begin + v.nbytes:
            if i != spans[k][2]:
                raise ArgumentError(
                    f"{name} of item {spans[k][2]} shares memory with an input of item {i}: pass separate memory"
                )
            k += 1
