"""Decoding of several frames at once, with one upload and one download for all of them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from codec.engines.cuda.decoding import DECODING_NBYTES, FOUND_NBYTES, NOTHING_FOUND, DeviceSink, Frame
from codec.engines.cuda.devices import Device
from codec.engines.cuda.header import DeviceHeader
from codec.engines.cuda.kernels import Kernel
from codec.engines.cuda.scratch import WarpScratch
from codec.engines.cuda.structs import PREPROCESSING
from codec.engines.cuda.upload import aligned
from codec.engines.cuda.workspace import CallMemory, grid_for, launch_each, small
from codec.engines.request import DecodeRequest
from codec.tensors.view import TensorView

_HEAD = 4096  # bytes of each frame that are downloaded first; most side sections end within them
_UPLOADED = 1 << 16  # maximum bytes of a copy that joins small frames in host memory
_NOWHERE = DeviceSink(0)
_MOST_LISTED = 256_000_000  # maximum bytes of the lists of changes of all Delta frames of a call


class DecodeStep(NamedTuple):
    """Frames that are decoded by the same launches, and their destinations.

    Attributes
    ----------
    items : sequence of (Frame, DeviceSink)
        Frames and their destinations.
    summing : int
        If not 0: one kernel decodes each group of `summing` consecutive items and adds up their values.
    """

    items: Sequence[tuple[Frame, DeviceSink]]
    summing: int = 0

    def launches(self, device: Device) -> list["KernelLaunch"]:
        """Return the kernel launches that this step needs, each with the frames that it decodes."""
        count = self.summing or 1
        if len(self.items) == count:
            kernel, grid = self._kernel(self.items, device)
            return [KernelLaunch(kernel.name, [grid], list(self.items), self.summing)]
        groups = [self.items[i : i + count] for i in range(0, len(self.items), count)]
        keys = [(kernel.name, -grid, i) for i, (kernel, grid) in enumerate(self._kernel(own, device) for own in groups)]
        keys.sort()  # by kernel, then by descending number of thread blocks
        found: list[KernelLaunch] = []
        for name, some in itertools.groupby(keys, key=lambda key: key[0]):
            own = list(some)
            items = [item for _, _, i in own for item in groups[i]]
            found.append(KernelLaunch(name, [-grid for _, grid, _ in own], items, self.summing))
        return found

    def _kernel(self, group: Sequence[tuple[Frame, DeviceSink]], device: Device) -> tuple[Kernel, int]:
        """Return the kernel for a frame, or for a group of frames to sum, and its number of thread blocks."""
        frame = group[0][0]
        if not self.summing or frame.summing is None:
            return frame.kernel, frame.grid
        nblocks = max([each.view.nblocks for each, _ in group])
        return frame.summing, frame.summing.grid(device.processors, nblocks)


class KernelLaunch(NamedTuple):
    """Launch of one kernel for several frames or sums, whose structs are adjacent in device memory."""

    kernel: str
    grids: list[int]  # number of thread blocks for each frame, or for each sum
    items: list[tuple[Frame, DeviceSink]]
    summing: int


def side_by_side(several: Sequence[Sequence[DecodeStep]]) -> list[DecodeStep]:
    """Merge independent lists of steps into one list that needs as few launches as possible."""
    found: list[DecodeStep] = []
    for steps in itertools.zip_longest(*several):
        by_count: dict[int, list[tuple[Frame, DeviceSink]]] = {}
        for step in steps:
            if step is not None:
                by_count.setdefault(step.summing, []).extend(step.items)
        found += [DecodeStep(items, count) for count, items in by_count.items()]
    return found


Each = Callable[..., Any]  # each(i, call, *arguments) returns call(*arguments) for frame i, and may add i to its error


def alone(_: int, call: Callable[..., Any], *args: Any) -> Any:
    """Return ``call(*args)``: an :data:`Each` that adds no index to errors."""
    return call(*args)


def read_headers(
    asked: Sequence[tuple[CallMemory, DecodeRequest, TensorView]], each: Each = alone
) -> list[DeviceHeader]:
    """Copy the headers and side sections of frames to host memory, and return a :class:`DeviceHeader` for each."""
    if not asked:
        return []
    work = asked[0][0]
    heads = work.fetch_all([frame.first(_HEAD) for _, r, frame in asked if r.head is None])
    given = [None if r.head is None else work.fetch(r.head.first(frame.nbytes)) for _, r, frame in asked]
    found = iter(heads)
    frames = [
        each(i, DeviceHeader, own, r, frame, next(found) if head is None else head)
        for i, ((own, r, frame), head) in enumerate(zip(asked, given, strict=True))
    ]
    short = [frame for frame in frames if frame.head.nbytes < frame.head_nbytes]
    longer = work.fetch_all([frame.frame.first(frame.head_nbytes) for frame in short])
    for frame, head in zip(short, longer, strict=True):
        frame.head = head
    if len(frames) > 1:
        _upload_small(work, frames)
    return frames


def _upload_small(work: CallMemory, frames: Sequence[DeviceHeader]) -> None:
    """Copy small frames in host memory to the device, joined into copies of up to 64 KiB."""
    groups: list[list[DeviceHeader]] = [[]]
    room = _UPLOADED
    for frame in frames:
        nbytes = aligned(frame.frame.nbytes)
        if frame.frame.device != "cpu" or not 0 < nbytes <= _UPLOADED:
            continue
        if nbytes > room:
            groups.append([])
            room = _UPLOADED
        groups[-1].append(frame)
        room -= nbytes
    for own in groups:
        if len(own) < 2:
            continue
        images = [frame.frame.array().tobytes() for frame in own]
        at = work.put(b"".join([image.ljust(aligned(len(image)), b"\0") for image in images]))
        for frame, image in zip(own, images, strict=True):
            frame.at, at = at, at + aligned(len(image))


class BatchDecode:
    """Batch of frames to decode, whose headers have been read and whose jobs have been copied to the device.

    Parameters
    ----------
    work : CallMemory
        Device memory of the call.
    frames : sequence of Frame
        All frames of the steps.
    steps : sequence of DecodeStep
        Steps in order of execution. The first step that decodes a frame checks the frame's digests.

    Attributes
    ----------
    found, found_nbytes : int
        Device address and size in bytes of the results of all checks, a codec_found for each frame.
    """

    def __init__(self, work: CallMemory, frames: Sequence[Frame], steps: Sequence[DecodeStep]) -> None:
        self._work, self._frames, device = work, frames, work.device
        self._launches = [step.launches(device) for step in steps]
        self._preprocessing = [some for frame in frames if (some := frame.preprocessing.struct())]
        kernels = {launch.kernel for launches in self._launches for launch in launches}
        device.prepare(kernels | {"preprocess"} if self._preprocessing else kernels)
        image = bytearray(b"".join(self._preprocessing))
        image += bytes(aligned(len(image)) - len(image))
        decodings = len(image)
        found = decodings + aligned(DECODING_NBYTES * sum(len(step.items) for step in steps))
        taken = aligned(found + FOUND_NBYTES * len(frames))
        needs = {id(frame): frame.scratch for frame in frames}
        scratch = WarpScratch(work, [(frame.kernel, frame.grid, needs[id(frame)]) for frame in frames])
        work.keep(scratch, brief=True)
        uploads = taken + scratch.taken_nbytes
        sizes = [len(frame.image.upload) for frame in frames]
        address = work.new(uploads + sum(sizes))
        self._preprocessing_at, self._at, self.found = address, address + decodings, address + found
        self.found_nbytes = FOUND_NBYTES * len(frames)
        images = itertools.accumulate(sizes, initial=address + uploads)
        founds = itertools.count(address + found, FOUND_NBYTES)
        places = {id(frame): (next(images), next(founds)) for frame in frames}
        seen = set[int]()
        for launch in itertools.chain(*self._launches):
            for frame, sink in launch.items:
                used = not launch.summing and needs[id(frame)].nbytes > 0
                units = scratch.units(address + taken, used=used)
                image += frame.decoding(*places[id(frame)], units, sink, checks=id(frame) not in seen)
                seen.add(id(frame))
        image = image.ljust(found, b"\0") + NOTHING_FOUND * len(frames)
        work.send(address, image.ljust(uploads, b"\0") + b"".join([frame.image.upload for frame in frames]))

    def begin(self, i: int) -> None:
        """Launch the kernels of step ``i``. Steps must be launched in order."""
        device = self._work.device
        if i == 0 and self._preprocessing:
            grid = grid_for(device, max(frame.view.n for frame in self._frames))
            launch_each(
                device, "preprocess", [grid] * len(self._preprocessing), self._preprocessing_at, PREPROCESSING.size
            )
        for launch in self._launches[i]:
            count = launch.summing
            more = (small(count),) if count else ()
            launch_each(device, launch.kernel, launch.grids, self._at, DECODING_NBYTES * (count or 1), *more)
            self._at += DECODING_NBYTES * len(launch.items)

    def close(self, each: Each = alone) -> None:
        """Wait for the stream, read the results of all checks, and raise the error of the first invalid frame."""
        self.conclude(bytes(self._work.device.download(self.found, self.found_nbytes)), each)

    def conclude(self, found: bytes, each: Each = alone) -> None:
        """Raise the error of the first invalid frame. `found`: bytes at :attr:`found` after all steps."""
        for i, frame in enumerate(self._frames):
            each(i, frame.close, found[FOUND_NBYTES * i : FOUND_NBYTES * (i + 1)])


def _take_lists(frames: Sequence[Frame]) -> None:
    """Allocate lists of changes for frames of Delta. Validation fills them, so that no block is decoded twice."""
    wanted = sum(frame.list_nbytes for frame in frames)
    for frame in frames:
        if nbytes := frame.list_nbytes:
            frame.take_lists(nbytes * min(wanted, _MOST_LISTED) // wanted)


def read(
    work: CallMemory,
    frames: Sequence[Frame],
    steps: Sequence[DecodeStep],
    *,
    verify_first: bool = False,
    each: Each = alone,
) -> None:
    """Decode opened frames, and raise the error of the first invalid one.

    With ``verify_first``, all frames are validated before anything is written.
    """
    if not frames:
        return
    if verify_first:
        _take_lists(frames)
        steps = [DecodeStep([(frame, _NOWHERE) for frame in frames]), *steps]
    batch = BatchDecode(work, frames, steps)
    for i in range(len(steps)):
        batch.begin(i)
        if i == (0 if verify_first else len(steps) - 1):
            batch.close(each)
