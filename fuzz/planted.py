"""Plant bugs in a copy of the library, one at a time, and measure how soon the fuzzers find them without a corpus.

``make planted`` runs this. Each bug takes a build and at most a minute of fuzzing. A bug removes one check
of hostile input or one guarantee of codec.h. The script prints a line for each bug, and fails if fewer than nine in
ten are found.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Fuzzer that should find the bug, description, and replacements (old, new). Each old text occurs once in native/src.
PLANTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "fuzz_frames",
        "division by zero for a coded plane without values",
        [
            ("return rows ? (ahead->n", "return 1 ? (ahead->n"),
            ("if (!count)\n\t\t\t\tBAD(", "if (0)\n\t\t\t\tBAD("),
        ],
    ),
    (
        "fuzz_frames",
        "reads words of a plane after the end of the region",
        [("if (nwords > (c->end - c->at) / 4)", "if (0)")],
    ),
    ("fuzz_frames", "reads tails of lanes after the end of the region", [("if (c->at > c->end)", "if (0)")]),
    (
        "fuzz_frames",
        "reads a raw plane after the end of the region",
        [
            (
                "if (c->end - c->at < n)\n\t\t\tBAD(c->at, c->end - c->at, n);\n\t\t*got",
                "if (0)\n\t\t\tBAD(c->at, c->end - c->at, n);\n\t\t*got",
            )
        ],
    ),
    (
        "fuzz_frames",
        "reads the bitmap of gaps after the end of the region",
        [("if (o->c.end - at < nbytes)", "if (0)")],
    ),
    ("fuzz_frames", "counts bits of gaps for quad rows that the block does not have", [("if (q >= nrows)", "if (0)")]),
    (
        "fuzz_frames",
        "reads literals after the end of the region",
        [("if (c->at >= c->end)\n\t\t\tBAD(c->end, 0, 1);", "if (0)\n\t\t\tBAD(c->end, 0, 1);")],
    ),
    (
        "fuzz_frames",
        "reads high nibbles after the end of the region",
        [
            (
                "if (c->end - c->at < nbytes)\n\t\tBAD(c->at, c->end - c->at, nbytes);\n\tfor",
                "if (0)\n\t\tBAD(c->at, c->end - c->at, nbytes);\n\tfor",
            )
        ],
    ),
    (
        "fuzz_frames",
        "accepts a region that ends after the frame",
        [("*end <= *at || *end > h->frame_nbytes", "*end <= *at")],
    ),
    (
        "fuzz_frames",
        "accepts overlapping regions",
        [("*at < h->regions_at || *end <= *at", "*at < h->regions_at")],
    ),
    (
        "fuzz_frames",
        "reads scales and codes after the end of the region",
        [("if (end - at != ALIGN8(p.nscales + ncodes))", "if (0)")],
    ),
    (
        "fuzz_frames",
        "accepts more parts than the job has room for",
        [("!nparts || nparts > WIRE_MAX_ROW_PARTS(j->h.n) ||", "!nparts ||")],
    ),
    (
        "fuzz_frames",
        "reads nibbles of a scale model after the side section",
        [("if (nibble_nbytes(&s) > end - p)", "if (0)")],
    ),
    (
        "fuzz_frames",
        "reads levels or pieces after the end of the region",
        [
            (
                "if (c->end - c->at < *nbytes)\n\t\tBAD(c->at, c->end - c->at, *nbytes);\n\tc->at",
                "if (0)\n\t\tBAD(c->at, c->end - c->at, *nbytes);\n\tc->at",
            )
        ],
    ),
    (
        "fuzz_frames",
        "one instruction set gives another result",
        [
            (
                "SETF(2), minus_least)); /* as round_small_value */\n\n\t\tv = AS_V(usual",
                "SETF(3), minus_least));\n\n\t\tv = AS_V(usual",
            )
        ],
    ),
    (
        "fuzz_frames",
        "writes the destination before the last block is validated",
        [("if (with->flags & (CODEC_VERIFY_FIRST | CODEC_CHECK_ONLY))", "if (0)")],
    ),
    (
        "fuzz_frames",
        "accepts the state of another tensor",
        [("if (digest != (uint32_t)", "if (0 && digest != (uint32_t)")],
    ),
    (
        "fuzz_encode",
        "writes the residual before the frame is known to fit",
        [("most > capacity ? RESIDUAL_LAST : RESIDUAL_WITH_BLOCKS", "RESIDUAL_WITH_BLOCKS")],
    ),
    ("fuzz_encode", "codec_bound omits the list of parts", [("+\n\t      nparts * (WIRE_SEGMENT_NBYTES + 8)", "")]),
    (
        "fuzz_encode",
        "codec_bound_segments omits the records of parts",
        [("4 + WIRE_SEGMENT_NBYTES * sum.nparts : 0", "4 : 0")],
    ),
    (
        "fuzz_encode",
        "one instruction set rounds differently",
        [("return ADD(ADD(draw, draw), SET1(1));", "return ADD(draw, draw);")],
    ),
    ("fuzz_encode", "writes regions after the end of the buffer", [("if (nbytes > capacity - at)", "if (0)")]),
    (
        "fuzz_calls",
        "reads a missing metric",
        [
            (
                "if (!with->metric)\n\t\treturn CODEC_MISSING_STATE;",
                "if (!with->metric)\n\t\treturn CODEC_OK;",
            )
        ],
    ),
    (
        "fuzz_calls",
        "processes blocks of a job that is not open",
        [
            (
                "memory && j->kind == kind && j->state == state ? j : NULL",
                "memory && j->kind == kind ? j : NULL",
            )
        ],
    ),
    (
        "fuzz_frames",
        "divides in float32 although results are stored in 16 bits",
        [("(with->divide > 0 && !divides(with->into))", "0")],
    ),
    (
        "fuzz_frames",
        "reduces into the destination with CODEC_CHECK_ONLY",
        [("if (with->flags & CODEC_CHECK_ONLY)\n\t\treturn CODEC_OK;", "")],
    ),
    (
        "fuzz_delta",
        "delta: accepts gaps behind the last value of a class",
        [("if (gap > total - next || l.count == l.room)", "if (l.count == l.room)")],
    ),
    (
        "fuzz_delta",
        "delta: writes more changes than the list has room for",
        [("if (gap > total - next || l.count == l.room)", "if (gap > total - next)")],
    ),
    (
        "fuzz_delta",
        "delta: accepts another base",
        [("return digest == j->base_digest ? CODEC_OK", "return CODEC_OK == 0 ? CODEC_OK")],
    ),
    (
        "fuzz_delta",
        "delta: lists changes of a part in the list of the whole",
        [("(first->state == DELTA_UNKNOWN || first->origin == range->first)", "1")],
    ),
    (
        "fuzz_delta",
        "delta: one instruction set has another class for exponent 0",
        [("_mm256_subs_epu8(_mm256_max_epu8(c[h], one), less)", "_mm256_subs_epu8(c[h], less)")],
    ),
]


def run(*command: object, **kw: object) -> "subprocess.CompletedProcess[str]":
    """Run a command and capture its output."""
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **kw)  # type: ignore[call-overload]


def main() -> int:
    """Test each bug; return 0 if at least nine in ten were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="maximum fuzzing time for each bug, in seconds (60)")
    parser.add_argument("--only", default="", help="test only bugs whose description contains this text")
    arguments = parser.parse_args()
    copy = ROOT / "build" / "planted"
    shutil.rmtree(copy, ignore_errors=True)
    for part in ("native", "fuzz"):
        shutil.copytree(ROOT / part, copy / part)
    (copy / "codec").mkdir()
    shutil.copy(ROOT / "codec/__init__.py", copy / "codec")  # CMake reads the version from this file
    build = copy / "build"
    options = ("-DCMAKE_C_COMPILER=clang", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCODEC_FUZZ=ON")
    if run("cmake", "-G", "Ninja", "-S", copy / "native", "-B", build, *options).returncode:
        sys.exit("CMake failed to configure the fuzzers; install cmake, ninja and clang")
    plants = [p for p in PLANTS if arguments.only in p[1]]
    found = 0
    for fuzzer, what, changes in plants:
        before = {path: path.read_text() for path in (copy / "native/src").rglob("*.[ch]")}
        for old, new in changes:
            holders = [path for path, text in before.items() if old in text]
            if [path.read_text().count(old) for path in holders] != [1]:
                sys.exit(f"{old!r} must occur once in native/src; it occurs in {[str(path) for path in holders]}")
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
