"""Algorithms for tensors on GPUs (docs/spec/protocol/collectives.md, sections 3 and 7).

Frames and random streams are the same as in :mod:`codec.torch.reduction.algorithms`, so results are bit-identical. All
frames of a phase are encoded together. Results are ready in stream order; :meth:`DeviceReduction.settle` raises the
errors of sums and decoding.
"""

import itertools
from collections.abc import Sequence

import torch

from codec._c.traits import is_lossless
from codec.torch.reduction.device import DeviceReduction
from codec.torch.reduction.exchange import PhaseFrames, Row, exchange
from codec.torch.reduction.host import FLOATS, Reduction, Values
from codec.torch.reduction.partition import Piece
from codec.torch.reduction.raw import Within, windows_of
from codec.torch.transport.collective import Collective, CollectivePart


async def two_shot(part: CollectivePart, r: DeviceReduction) -> Values:
    """Run a two-shot all-reduce: each rank sums one slice over all ranks, and sends the sum to all ranks."""
    slices, me, size = r.slices(part.size), part.rank, part.size
    frames = exchange(part, r, slices, gathers=True)
    terms = await frames.scatter()
    first = (size**2 + me) * len(slices[me])
    totals = [r.sum_buffer(part, piece.n) for piece in slices[me]]
    for c, (piece, total) in enumerate(zip(slices[me], totals, strict=True)):
        row = await terms.chunk(c)
        with part.clock.during("decode_s"):
            r.check_terms(part, row, piece)
            r.sum(row, piece, total)
    await r.launched()
    sums = [r.sum_term(totals[c], piece, first + c) for c, piece in enumerate(slices[me])]
    found = await frames.gather(sums, slices)
    result = r.result(part, r.n)
    for c in range(len(slices[me])):
        row = await found.chunk(c)
        if is_lossless(r.spec):  # copy this rank's sum instead of decoding its frame
            result[slices[me][c].begin : slices[me][c].end] = sums[c].values
            row[me] = None
        _decode(part, r, row, [each[c] for each in slices], [result] * size, r.ranks_in_sum(size))
    await part.sent()
    return result


async def all_gather(part: CollectivePart, r: DeviceReduction) -> Values:
    """Run an all-gather all-reduce: each rank sends its frames to all ranks, and sums the frames of all ranks."""
    pieces = [piece for row in r.slices(1) for piece in row]
    found = await _gathered(part, r, pieces)
    result = r.result(part, r.n)
    for c, piece in enumerate(pieces):
        _store_sum(part, r, await found.chunk(c), piece, result[piece.begin :])
    await part.sent()
    return result


async def gather(part: CollectivePart, r: DeviceReduction) -> Values:
    """Gather the values of all ranks, in rank order."""
    size, n = part.size, r.n
    pieces = [piece for row in r.slices(1) for piece in row]
    found = await _gathered(part, r, pieces)
    result = r.result(part, size * n)
    places = [result[i * n : (i + 1) * n] for i in range(size)]
    for c, piece in enumerate(pieces):
        row = await found.chunk(c)
        _keep_own(r, row, piece, places[part.rank][piece.begin : piece.end])
        _decode(part, r, row, [piece] * size, places)
    await part.sent()
    return result


async def _gathered(part: CollectivePart, r: DeviceReduction, pieces: Sequence[Piece]) -> PhaseFrames:
    """Send this rank's terms to all ranks, and return the terms of all ranks."""
    first = part.rank * len(pieces)
    terms = [r.term(piece, first + c) for c, piece in enumerate(pieces)]
    return await exchange(part, r, [pieces]).gather(terms, [pieces] * part.size)


async def reduce_scatter(part: CollectivePart, r: DeviceReduction) -> Values:
    """Run a reduce-scatter: each rank sums one slice over all ranks. All slices have equal size."""
    slices = r.even_slices(part.size)
    terms = await exchange(part, r, slices).scatter()
    mine = slices[part.rank]
    result = r.result(part, r.n // part.size)
    for c, piece in enumerate(mine):
        _store_sum(part, r, await terms.chunk(c), piece, result[piece.begin - mine[0].begin :])
    await part.sent()
    return result


async def all_to_all(part: CollectivePart, r: DeviceReduction) -> Values:
    """Run an all-to-all: each rank sends slice i to rank i. All slices have equal size."""
    slices, me = r.even_slices(part.size), part.rank
    terms = await exchange(part, r, slices).scatter()
    result = r.result(part, r.n)
    for c in range(len(slices[me])):
        row = await terms.chunk(c)
        _keep_own(r, row, slices[me][c], result[slices[me][c].begin : slices[me][c].end])
        _decode(part, r, row, [each[c] for each in slices], [result] * part.size)
    await part.sent()
    return result


def _store_sum(part: CollectivePart, r: DeviceReduction, row: Row, piece: Piece, place: Values) -> None:
    """Store the sum of a piece in the tensor's dtype; raise an error for NaN and Inf if encoding the sum would."""
    place, check = place[: piece.n], r.rejects_nonfinite
    with part.clock.during("decode_s"):
        r.check_terms(part, row, piece)
        if r.dtype == "float32":
            r.sum(row, piece, place, check_finite=check)
            return
        total = r.sum_buffer(part, piece.n)
        r.sum(row, piece, total, check_finite=check)

        def store() -> None:
            place[:] = r.rounded(total)
            if check:  # a sum that is finite in float32 may overflow in the tensor's dtype
                r.refuse_overflow(place)

        r.joint.after(store)


def _keep_own(r: DeviceReduction, row: Row, piece: Piece, place: Values) -> None:
    """Store this rank's own values in the result if `row` contains no frame of them."""
    if None in row:
        place[:] = r.own_term(piece)


def _decode(
    part: CollectivePart,
    r: DeviceReduction,
    row: Row,
    pieces: Sequence[Piece],
    results: Sequence[Values],
    count: int | None = None,
) -> None:
    """Decode the frame of each rank to its piece of a result; `count` is as for :meth:`Reduction.check_norm`."""
    with part.clock.during("decode_s"):
        for rank, (frame, piece) in enumerate(zip(row, pieces, strict=True)):
            if frame is not None:
                r.check_norm(part, rank, piece, frame, count)
        places = zip(row, pieces, results, strict=True)
        r.decode_all([(frame, piece, result) for frame, piece, result in places if frame is not None])


async def plain(part: CollectivePart, r: DeviceReduction) -> Values:
    """Run NCCL's uncompressed all-reduce, which adds in the tensor's dtype and in an order that NCCL chooses.

    For a mean, values are divided before the sum, as in DDP. Residuals are added to the values; new residuals are the
    errors of rounding to the tensor's dtype.
    """
    values = _shares(part, r)
    r.check_values(part, part.rank, r.as_float32(r.x))  # the values of other ranks are never seen
    if r.rejects_nonfinite:  # raise the error that encoding the values would raise
        r.refuse_nonfinite(values)
    if r.rejects_nonfinite or r.settings.max_norm is not None:
        r.settle(part.device)
    await part.gather([0])  # wait for all ranks, since NCCL's messages could not be cancelled if a rank had failed
    part.counters.round_trips += 1
    with part.device.phase():
        part.device.all_reduce(values, part.counters)
    if r.rejects_nonfinite:
        r.refuse_overflow(values)
    if r.out is None:
        return values
    return r.out.copy_(values)


def _shares(part: CollectivePart, r: DeviceReduction) -> torch.Tensor:
    """Return the values that this rank contributes to the sum, in new memory, and update the residuals."""
    share = part.size if r.op == "mean" else 1
    if r.residual is None and r.sum_residual is None:
        return r.x / share
    exact = r.as_float32(r.x) if r.residual is None else r.as_float32(r.x) + r.residual
    exact = exact / share
    if r.sum_residual is not None:
        mine = r.slices(part.size)[part.rank]
        sums = r.sum_residual(mine[0].begin, mine[-1].end)
        exact[mine[0].begin : mine[-1].end] += sums
        sums.zero_()
    values = exact.to(FLOATS[r.dtype])
    if r.residual is not None:
        r.residual.copy_(((exact - values.float()) * share).nan_to_num_(0.0, 0.0, 0.0))
    return values


class WithinGpus(Within):
    """Reduction of tensors within a machine whose GPUs are connected by NCCL. Values stay on GPUs.

    Results are bit-identical to those of :class:`Within` with uncompressed values. NCCL's messages of all collectives
    have the same order on all ranks of the machine: those of a collective follow those of earlier ones. Before them,
    the ranks wait for each other on the host, since NCCL's messages could not be cancelled if a rank had failed.

    Parameters
    ----------
    collective, item
        As for :class:`Within`.
    whole : sequence of DeviceReduction
        The tensors, of one dtype, without residuals.
    later : list of WithinGpus, optional
        List to which :meth:`gather` adds this object. The caller completes the tensors by :func:`gather_within`, and
        calls :meth:`DeviceTransfer.pass_turn`. Default: :meth:`gather` completes the tensors.
    """

    _on_gpus = True

    def __init__(
        self,
        collective: Collective,
        whole: Sequence[DeviceReduction],
        item: int | str | None = None,
        later: "list[WithinGpus] | None" = None,
    ) -> None:
        super().__init__(collective, whole, item)
        self._later = later
        self._tensors = whole
        self._windows = [windows_of(r, self._members) for r in whole]
        self._each = [*zip(whole, self._windows, strict=True)]
        self._wholes = [r.empty(r.n) if r.out is None else r.out for r in whole]  # results

    async def scatter(self) -> list[Reduction]:
        """Return the reduction of this rank's window of each tensor between machines."""
        c, me = self._collective, self._members.rank
        checked = [r for r in self._tensors if r.rejects_nonfinite]
        for r in checked:  # raise the error that encoding the values would raise
            r.refuse_nonfinite(r.x)
            r.request_verdicts()
        for r in checked:
            r.settle(c.device)
        await self.meet(c, "scatter")
        ranks = range(self._members.size)
        nbytes = [sum(w[rank].n * r.x.itemsize for r, w in self._each) for rank in ranks]
        rows = None
        if any(nbytes):
            with c.device.phase():
                values = [r.x[w[rank].begin : w[rank].end] for rank in ranks for r, w in self._each]
                joined = torch.cat(values) if len(self._tensors) > 1 else self._tensors[0].x
                rows = c.device.scatter(_as_bytes(joined), nbytes, me, c.counters)
        found: list[Reduction] = []
        begin = 0
        for (r, w), out in zip(self._each, self._wholes, strict=True):
            window, end = w[me], begin + w[me].n * r.x.itemsize
            mean = r.empty(0)
            if rows is not None and window.n:
                terms = [row[begin:end].view(r.x.dtype) for row in rows]
                for rank, term in enumerate(terms):
                    r.check_values(self._members, rank, r.as_float32(term))
                mean = _reduced(r, terms)
            found.append(r.narrowed(window, mean, out[window.begin : window.end], self._members.size))
            begin = end
        for r in self._tensors:
            if r.settings.max_norm is not None:
                r.settle(c.device)
        return found

    async def gather(self, results: Sequence[Values]) -> list[Values]:
        """Return the whole tensors, of which `results` are this rank's windows after :meth:`scatter`."""
        for out, w, result in zip(self._wholes, self._windows, results, strict=True):
            place = out[w[self._members.rank].begin : w[self._members.rank].end]
            if result.data_ptr() != place.data_ptr():
                place.copy_(result)
        if self._later is None:
            await gather_within(self._collective, [self])
        else:
            self._later.append(self)
        return [*self._wholes]

    async def meet(self, collective: Collective, name: str) -> None:
        """Wait for the turn of a collective to send messages by NCCL, and for the other ranks of the machine."""
        await collective.device.turn(collective.number)
        await self._part(name, collective).gather([0])

    def send_results(self, collective: Collective) -> None:
        """Send this rank's windows of the results to all ranks of the machine, and store theirs."""
        sizes = [[w[rank].n * r.x.itemsize for r, w in self._each] for rank in range(self._members.size)]
        most = max(map(sum, sizes))
        if not most:
            return
        row, me = self._tensors[0].empty_bytes((most,)), self._members.rank
        for out, w, at, n in self._places(sizes[me], me):
            row[at : at + n] = _as_bytes(out[w.begin : w.end])
        rows = collective.device.all_gather(row, collective.counters)
        for rank in self._members.others:
            for out, w, at, n in self._places(sizes[rank], rank):
                out[w.begin : w.end] = rows[rank][at : at + n].view(out.dtype)

    def _places(self, nbytes: Sequence[int], rank: int) -> list[tuple[Values, Piece, int, int]]:
        """Return each result, the window of a rank, and the begin and size of the window's bytes in its row."""
        begins = [0, *itertools.accumulate(nbytes)]
        windows = [w[rank] for w in self._windows]
        return [*zip(self._wholes, windows, begins[:-1], nbytes, strict=True)]


async def gather_within(collective: Collective, items: Sequence[WithinGpus]) -> None:
    """Complete the tensors of reductions within a machine, in the turn of `collective`; wait for the GPU.

    Raises
    ------
    PeerError
        A rank of the machine has failed, is lost, or does not answer in time.
    """
    if not items:
        return
    await items[-1].meet(collective, "gather")
    with collective.device.phase():
        for item in items:
            item.send_results(collective)
    collective.device.settle()


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return x.contiguous().view(torch.uint8)


def _reduced(r: DeviceReduction, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, mean or maximum of the ranks' values, in float32 and in rank order, rounded to the dtype."""
    first, second, *more = [r.as_float32(term) for term in terms]
    total = torch.maximum(first, second) if r.op == "max" else first + second
    for each in more:
        total = torch.maximum(total, each) if r.op == "max" else total.add_(each)
    if r.op == "mean":  # division by a tensor: for a number, CUDA multiplies by its reciprocal, and rounds twice
        total.div_(torch.empty(1, dtype=torch.float32, device=total.device).fill_(len(terms)))
    return r.rounded(total)
