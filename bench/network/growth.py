"""Formulas of the bytes, messages, waits and CPU time of an all-reduce by the number of ranks.

For ranks.py, which compares them with measurements, and regions.py, which simulates with them.

Small buckets are reduced together, as one. A bucket of n values is cut into slices, one for each of N ranks. In the
algorithm "two_shot", each rank sends the frame of each slice to the slice's owner, who sends the encoded sum to all
others. At the end of a step, all ranks report to rank 0, which answers: the verdict, in large groups along a tree. Each
number that the library's protocol determines is computed in one function or constant of this module. Numbers are means
over ranks.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

HEADER_NBYTES = 48  # header of a message
GRAIN = 1024  # slices of a tensor without rows begin at multiples of this number of values
CHUNK_NBYTES = 1 << 22  # of float32 values; a larger slice is sent as several frames
LARGE_NBYTES = 1 << 20  # slices above this have at least two chunks
MOST_CHUNKS = 16
JOINED_NBYTES = 1 << 17  # consecutive buckets are reduced together until they have this number of bytes for each rank
TREE_RANKS = 64  # ranks from which the verdict travels along a tree of two levels
AUTO_NBYTES = 1 << 17  # "auto" sends by all-gather up to this number of bytes / N
CREATE_TRIPS = 5  # round trips until a group is connected: store, connections, hello
OWN_DESCRIPTORS = 5  # open files of a group besides its connections: listener, epoll, pair that wakes the thread

LEAST_ROWS = 4  # number of measured rows from which terms are fitted
FITTED = ("bucket_s", "message_s", "value_s", "bits", "frame_nbytes")  # terms that `fit` determines

Row = dict[str, Any]


@dataclass(frozen=True)
class Terms:
    """CPU seconds and bytes that a step takes.

    The defaults are those that ranks.py has fitted for docs/benchmarks/scale.md. That of `plain_trips` was
    adjusted to the float32 steps on that page, so that comparing these with the model is no independent check.

    Parameters
    ----------
    bucket_s, message_s, value_s : float
        CPU seconds of a rank for each bucket, each message that it sends, and each value.
    bits : float
        Bits of a frame for each value.
    frame_nbytes : float
        Bytes of a frame besides these.
    plain_trips : float
        Round trips for which a float32 step waits, as a share of those of all buckets one after the other.
    """

    bucket_s: float = 1.1e-3
    message_s: float = 0.16e-3
    value_s: float = 4.2e-9
    bits: float = 4.5
    frame_nbytes: float = 70.0
    plain_trips: float = 0.7


def load(path: str) -> Row:
    """Return the contents of a JSON file of ranks.py: `terms`, and the rows of each part in `parts`."""
    try:
        found = json.loads(Path(path).read_text())
        return {"terms": dict(found["terms"]), "parts": dict(found["parts"])}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise SystemExit(f"{path}: not a file that ranks.py --json writes: {type(e).__name__}: {e}") from None


def load_terms(path: str | None) -> Terms:
    """Return the terms in a JSON file of ranks.py; those that the file lacks, and all without a file, are defaults."""
    found = {} if path is None else load(path)["terms"]
    return Terms(**{f.name: found[f.name] for f in fields(Terms) if f.name in found})


# Formulas of the protocol


def slices(values: float, ranks: int, grain: int = GRAIN) -> int:
    """Return the number of slices of a bucket that have values; ranks without one send no sums."""
    return max(1, min(ranks, math.ceil(values / grain)))


def chunks(values: float, ranks: int) -> int:
    """Return the number of frames of a slice."""
    nbytes = 4 * values / ranks
    return max(2 if nbytes > LARGE_NBYTES else 1, min(MOST_CHUNKS, round(nbytes / CHUNK_NBYTES)))


def runs(values: float, ranks: int, buckets: int = 1) -> int:
    """Return the number of collectives that reduce `values` values in equal buckets: small buckets are joined."""
    joined = math.ceil(JOINED_NBYTES * ranks / (4 * values / buckets))
    return math.ceil(buckets / max(1, joined))


def frames(values: float, ranks: int, buckets: int = 1, grain: int = GRAIN) -> float:
    """Return the number of frames that a rank sends for `values` values in equal buckets."""
    of_bucket = values / buckets
    every = slices(of_bucket, ranks, grain) * chunks(of_bucket, ranks)
    return buckets * 2 * (ranks - 1) / ranks * every


def messages(values: float, ranks: int, buckets: int = 1, grain: int = GRAIN, verdicts: int = 1) -> float:
    """Return the number of messages that a rank sends: one for each frame, and those of the verdicts."""
    return frames(values, ranks, buckets, grain) + verdicts * 2 * (ranks - 1) / ranks


def frame_nbytes(terms: Terms, values: float, ranks: int, buckets: int = 1, grain: int = GRAIN) -> float:
    """Return the bytes of the frames that a rank sends."""
    both = 2 * (ranks - 1) / ranks
    return both * values * terms.bits / 8 + terms.frame_nbytes * frames(values, ranks, buckets, grain)


def sent_nbytes(terms: Terms, values: float, ranks: int, buckets: int = 1, grain: int = GRAIN) -> float:
    """Return the bytes of all messages that a rank sends, without those of TCP."""
    headers = HEADER_NBYTES * messages(values, ranks, buckets, grain)
    return frame_nbytes(terms, values, ranks, buckets, grain) + headers


def round_trips(ranks: int) -> float:
    """Return the round trips for which a step waits: two messages that wait for others, and the verdict."""
    return (0.0, 0.0, 1.5, 2.0)[min(ranks, 3)] + (ranks >= TREE_RANKS)


def cpu_seconds(terms: Terms, values: float, buckets: float, sent: float) -> float:
    """Return the CPU seconds of a rank for a step in which it sends `sent` messages."""
    return buckets * terms.bucket_s + sent * terms.message_s + values * terms.value_s


def auto_nbytes(terms: Terms, values: float, ranks: int) -> float:
    """Return the bytes of frames that a rank sends with ``algorithm="auto"``, if it does not choose raw values."""
    if ranks == 2 or 4 * values * ranks <= AUTO_NBYTES:
        return (ranks - 1) * (values * terms.bits / 8 + terms.frame_nbytes)
    return frame_nbytes(terms, values, ranks)


def descriptors(ranks: int) -> int:
    """Return the open files that a group adds to a process: a connection for each other rank, and a few."""
    return ranks - 1 + OWN_DESCRIPTORS


def create_seconds(rtt: float) -> float:
    """Return the seconds to connect a group over links with a round-trip time in seconds, for any number of ranks."""
    return CREATE_TRIPS * rtt


# Fit


def _least_squares(columns: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return the factors of the columns with the least sum of squared relative errors; none is negative."""
    a, y = np.array(columns, float).T, np.array(wanted, float)
    used = list(range(a.shape[1]))
    while used:
        found = np.linalg.lstsq(a[:, used] / y[:, None], np.ones(len(y)), rcond=None)[0]
        if found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    else:
        found = np.zeros(0)
    factors = dict(zip(used, found.tolist(), strict=True))
    return [factors.get(i, 0.0) for i in range(a.shape[1])]


def fit(rows: Sequence[Row], defaults: Terms | None = None) -> Terms:
    """Return the terms that fit measured rows best.

    Parameters
    ----------
    rows : sequence of dict
        Rows of ranks.py with ranks, buckets, values, grain, messages, frame_nbytes and codec_s, the CPU seconds of a
        rank and step that the codec and its messages take. Rows without codec_s do not count for CPU time.
    defaults : Terms, optional
        Terms for which there are fewer than LEAST_ROWS rows.
    """
    found = asdict(defaults or Terms())
    timed = [row for row in rows if row.get("codec_s", 0) > 0]
    if len(timed) >= LEAST_ROWS:
        columns = [[row[key] for row in timed] for key in ("buckets", "messages", "values")]
        found |= zip(
            ("bucket_s", "message_s", "value_s"), _least_squares(columns, [r["codec_s"] for r in timed]), strict=True
        )
    sized = [row for row in rows if row.get("frame_nbytes")]
    if len(sized) >= LEAST_ROWS:
        both = [2 * (row["ranks"] - 1) / row["ranks"] * row["values"] / 8 for row in sized]
        count = [frames(r["values"], r["ranks"], r.get("joined", r["buckets"]), r["grain"]) for r in sized]
        found |= zip(
            ("bits", "frame_nbytes"),
            _least_squares([both, count], [row["frame_nbytes"] for row in sized]),
            strict=True,
        )
    return Terms(**found)


def fitted(terms: Terms, row: Row) -> Row:
    """Return what the formulas say for a measured row: messages, bytes of frames, and CPU seconds."""
    what = row["values"], row["ranks"], row.get("joined", row["buckets"]), row["grain"]
    sent = messages(*what, verdicts=row["verdicts"])
    return {
        "messages": sent,
        "frame_nbytes": frame_nbytes(terms, *what),
        "codec_s": cpu_seconds(terms, row["values"], row["buckets"], sent),
    }
