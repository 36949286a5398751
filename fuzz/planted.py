"""Plant bugs in a copy of the library, one at a time, and see how soon the fuzzers find them, from no corpus.

``make planted`` runs it. Each bug takes away one check that stands between hostile bytes and memory, or one promise.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# the fuzzer that should find it, what it is, and what becomes what: text that stands in the library once
PLANTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "fuzz_frames",
        "a coded plane of no values divides by zero",
        [
            ("return rows ? (ahead->n", "return 1 ? (ahead->n"),
            ("if (!count)", "if (0)"),
        ],
    ),
    (
        "fuzz_frames",
        "words of a plane beyond the region",
        [("if (nwords > (c->end - c->at) / 4)", "if (0)")],
    ),
    ("fuzz_frames", "tails of lanes beyond the region", [("if (c->at > c->end)", "if (0)")]),
    (
        "fuzz_frames",
        "a raw plane beyond the region",
        [
            (
                "if (c->end - c->at < n)\n\t\t\tBAD(c->at, c->end - c->at, n);\n\t\t*got",
                "if (0)\n\t\t\tBAD(c->at, c->end - c->at, n);\n\t\t*got",
            )
        ],
    ),
    (
        "fuzz_frames",
        "literals beyond the region",
        [("if (c->at >= c->end)\n\t\t\tBAD(c->end, 0, 1);", "if (0)\n\t\t\tBAD(c->end, 0, 1);")],
    ),
    (
        "fuzz_frames",
        "high nibbles beyond the region",
        [
            (
                "if (c->end - c->at < nbytes)\n\t\tBAD(c->at, c->end - c->at, nbytes);\n\tfor",
                "if (0)\n\t\tBAD(c->at, c->end - c->at, nbytes);\n\tfor",
            )
        ],
    ),
    (
        "fuzz_frames",
        "a region that ends behind the frame",
        [("*end <= *at || *end > h->frame_nbytes", "*end <= *at")],
    ),
    (
        "fuzz_frames",
        "regions that overlap",
        [("*at < h->regions_at || *end <= *at", "*at < h->regions_at")],
    ),
    (
        "fuzz_frames",
        "scales and codes beyond the region",
        [("if (end - at != ALIGN8(p.nscales + ncodes))", "if (0)")],
    ),
    (
        "fuzz_frames",
        "more parts than the job has room for",
        [("!nparts || nparts > WIRE_MAX_PARTS(j->h.n) ||", "!nparts ||")],
    ),
    (
        "fuzz_frames",
        "nibbles of a scale model beyond the side section",
        [("if (nibble_nbytes(&s) > end - p)", "if (0)")],
    ),
    (
        "fuzz_frames",
        "levels or pieces beyond the region",
        [
            (
                "if (c->end - c->at < *nbytes)\n\t\tBAD(c->at, c->end - c->at, *nbytes);\n\tc->at",
                "if (0)\n\t\tBAD(c->at, c->end - c->at, *nbytes);\n\tc->at",
            )
        ],
    ),
    (
        "fuzz_frames",
        "another result on one instruction set",
        [("MINF(normal, FMA(normal, SETF(2), minus_least))", "normal")],
    ),
    (
        "fuzz_frames",
        "a destination written before the last block is checked",
        [("if (with->flags & (CODEC_VERIFY_FIRST | CODEC_CHECK_ONLY))", "if (0)")],
    ),
    (
        "fuzz_frames",
        "state of others taken for one's own",
        [("if (digest != (uint32_t)", "if (0 && digest != (uint32_t)")],
    ),
    (
        "fuzz_encode",
        "a residual written before it is known that the frame fits",
        [("most > capacity ? RESIDUAL_LAST : RESIDUAL_WITH_BLOCKS", "RESIDUAL_WITH_BLOCKS")],
    ),
    ("fuzz_encode", "a bound that forgets the list of parts", [("+\n\t      nparts * (WIRE_SEGMENT_NBYTES + 8)", "")]),
    (
        "fuzz_encode",
        "a rounding that another instruction set does not do",
        [("return ADD(ADD(draw, draw), SET1(1));", "return ADD(draw, draw);")],
    ),
    ("fuzz_encode", "regions beyond the buffer", [("if (nbytes > capacity - at)", "if (0)")]),
    (
        "fuzz_calls",
        "a metric that is not there",
        [
            (
                "if (!with->metric)\n\t\treturn CODEC_MISSING_STATE;",
                "if (!with->metric)\n\t\treturn CODEC_OK;",
            )
        ],
    ),
    (
        "fuzz_calls",
        "blocks of a job that has not begun",
        [
            (
                "memory && j->kind == kind && j->state == state ? j : NULL",
                "memory && j->kind == kind ? j : NULL",
            )
        ],
    ),
    (
        "fuzz_frames",
        "results divided in float32, where they are stored in 16 bits",
        [("(with->divide > 0 || with->flags & CODEC_RESCALE)", "0")],
    ),
    (
        "fuzz_frames",
        "a reduction that writes though it is only to check",
        [("if (with->flags & CODEC_CHECK_ONLY)\n\t\treturn CODEC_OK;", "")],
    ),
]


def run(*command: object, **kw: object) -> "subprocess.CompletedProcess[str]":
    """Run quietly; the result has what was printed."""
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **kw)  # type: ignore[call-overload]


def main() -> int:
    """Print a line a bug; 0 if at least nine in ten were found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each bug (60)")
    parser.add_argument("--only", default="", help="bugs whose description contains this")
    arguments = parser.parse_args()
    copy = ROOT / "build" / "planted"
    shutil.rmtree(copy, ignore_errors=True)
    for part in ("native", "fuzz"):
        shutil.copytree(ROOT / part, copy / part)
    build = copy / "build"
    options = ("-DCMAKE_C_COMPILER=clang", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCODEC_FUZZ=ON")
    if run("cmake", "-G", "Ninja", "-S", copy / "native", "-B", build, *options).returncode:
        sys.exit("cmake, ninja and clang are needed")
    plants = [p for p in PLANTS if arguments.only in p[1]]
    found = 0
    for fuzzer, what, changes in plants:
        before = {path: path.read_text() for path in (copy / "native/src").rglob("*.[ch]")}
        for old, new in changes:
            holders = [path for path, text in before.items() if old in text]
            if [path.read_text().count(old) for path in holders] != [1]:
                sys.exit(f"{old!r} does not stand in one place of the library but in {holders}")
            holders[0].write_text(holders[0].read_text().replace(old, new))
        made = run("cmake", "--build", build, "--target", fuzzer)
        if made.returncode:
            sys.exit(made.stdout[-2000:])
        start = time.monotonic()
        limits = ("-max_len=256", "-len_control=0", f"-artifact_prefix={build}/", "-seed=1", "-timeout=20")
        caught = run(build / fuzzer, f"-max_total_time={arguments.seconds}", *limits).returncode != 0
        found += caught
        print(f"{time.monotonic() - start:6.1f} s  {'found' if caught else 'MISSED':6s}  {fuzzer}: {what}", flush=True)
        for path, text in before.items():
            if path.read_text() != text:
                path.write_text(text)
    print(f"{found} of {len(plants)} found")
    return 0 if 10 * found >= 9 * len(plants) else 1


if __name__ == "__main__":
    sys.exit(main())
