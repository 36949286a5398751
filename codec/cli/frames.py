"""Commands ``codec inspect`` and ``codec verify``, for frames, packs and other files of codec."""

import argparse
from collections import Counter
from contextlib import closing
from dataclasses import asdict, fields
from typing import Any

from codec.advisor.advise import named
from codec.cli.checkpoints import is_checkpoint, verify_folder
from codec.cli.console import EXIT_CODES, STANDARD, add_json, print_entries, print_error
from codec.cli.packs import is_pack_file, pack_entries, verify_pack
from codec.cli.updates import check_signed_update, is_update, update_entries, verify_update
from codec.errors import ArgumentError, CodecError, FrameError, StateError
from codec.files.frames import inspect_file, verify_file
from codec.files.opening import FileKind, kind_of, opened, printable
from codec.files.signing import SigningKey, check_file
from codec.stateful.activation.store_info import inspect_store, is_store

_ACCEPTED = "frame, - for standard input, pack, packed model file, update of weights, or folder of activations"
_VERIFIED = f"{_ACCEPTED} or of a checkpoint"


def add_commands(commands: Any) -> None:
    """Add the parsers of the commands ``inspect`` and ``verify`` to the parsers of all commands."""
    p = commands.add_parser(
        "inspect",
        help="print the header of a frame, or what a file holds",
        description=f"Print the header of a frame, or what a file holds. {EXIT_CODES}",
    )
    p.add_argument("file", help=_ACCEPTED)
    add_json(p)
    p.set_defaults(run=run_inspect)
    p = commands.add_parser(
        "verify",
        help="check that files are not damaged",
        description="Check frames without decoding their values, and all digests of packed files. Exit codes: 0; 1 if "
        "a file is damaged or cannot be read; 2 for wrong arguments.",
    )
    p.add_argument("files", nargs="+", metavar="file", help=_VERIFIED)
    p.add_argument("--key", metavar="KEYFILE", help="check signatures, too: that of an update, or of FILE in FILE.sig")
    p.add_argument("--context", metavar="TEXT", help="text that FILE was signed with by pack --context")
    p.set_defaults(run=run_verify)


def run_inspect(args: argparse.Namespace) -> int:
    """Print the header of a frame, as :func:`codec.inspect` returns it, or a summary of a file of another kind."""
    entries: dict[str, Any]
    if is_store(args.file):
        entries = asdict(inspect_store(args.file))
    elif is_update(args.file):
        entries = update_entries(args.file)
    elif is_pack_file(args.file):
        entries = pack_entries(args.file)
    elif args.file != STANDARD and _kind(args.file) is FileKind.SAFETENSORS:
        entries = _model_entries(args.file)
    else:
        _check_frame(args.file)
        try:
            info = inspect_file(args.file)
        except FrameError as e:
            e.of(args.file)
            raise
        found = {f.name: getattr(info, f.name) for f in fields(info)}
        entries = found | {"spec": named(info.spec), "ratio": info.ratio}
    print_entries(args, entries)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Verify each file; return 1 if a file is damaged or cannot be read, otherwise 0."""
    failed = 0
    key = SigningKey.to_verify(args.key)
    if args.context is not None and key is None:
        raise ArgumentError("--context is part of a signature: pass --key, too")
    for file in args.files:
        try:
            if key is not None:
                _check_signed(file, key, args.context)
            verified = _verify(file) + (", signed with this key" if key is not None else "")
        except CodecError as e:
            failed = 1
            if isinstance(e, FrameError):
                e.of(file)
            print_error(e)
        else:
            print(f"{printable(file)}: {verified}", flush=True)
    return failed


def _check_signed(path: str, key: SigningKey, context: str | None) -> None:
    """Raise CodecError unless a file is signed with a key and a context."""
    if path == STANDARD or is_store(path) or is_checkpoint(path):
        raise ArgumentError(f"{printable(path)} has no signature: --key is for files")
    if context is not None or not (is_update(path) and check_signed_update(path, key)):
        check_file(path, key, context)


def _kind(path: str) -> FileKind:
    with opened(path) as fd:
        return kind_of(fd)


def _check_frame(path: str) -> None:
    """Raise ArgumentError, with the file's format, for a file that is known to be no frame."""
    if path == STANDARD:
        return
    kind = _kind(path)
    if kind in (FileKind.NPZ, FileKind.NPY, FileKind.TORCH):
        raise ArgumentError(f"{printable(path)} is {kind.value}, not a frame: codec ls lists its tensors")
    if kind not in (FileKind.FRAME, FileKind.UNKNOWN, FileKind.EMPTY):
        raise ArgumentError(f"{printable(path)} is {kind.value}, not a frame")


def _model_entries(path: str) -> dict[str, Any]:
    """Return the entries that ``codec inspect`` prints for a packed file or a .safetensors file."""
    from codec.files.reading import PackedFile, open_model

    with closing(open_model(path)) as model:
        header = model.header
        entries: dict[str, Any] = {
            "file": path, "kind": "a .safetensors file", "tensors": len(header.tensors),
            "tensors_nbytes": header.data_nbytes, "dtypes": dict(Counter(t.dtype for t in header.tensors)),
            "metadata": header.metadata,
        }  # fmt: skip
        if isinstance(model, PackedFile):
            entries |= {"kind": "a packed model file", "nbytes": model.nbytes, "unpacked_nbytes": header.nbytes,
                        "ratio": model.nbytes / header.nbytes, "parts": len(model.index.parts),
                        "equal": len(model.index.equal),
                        "codings": dict(Counter(p.coding for p in model.index.parts))}  # fmt: skip
        return entries


def _verify(path: str) -> str:
    """Verify a file; return a line that describes it. Raise CodecError if it is damaged."""
    if is_store(path):
        info = inspect_store(path, verify=True)
        if info.damaged:
            raise StateError(f"{printable(path)}: {info.damaged} of {info.samples} samples are damaged")
        return f"{info.samples} samples, all whole"
    if is_checkpoint(path):
        return verify_folder(path)
    if is_update(path):
        return verify_update(path)
    if is_pack_file(path):
        return verify_pack(path)
    if path != STANDARD and _kind(path) is FileKind.SAFETENSORS:
        return _verify_model(path)
    _check_frame(path)
    verify_file(path)
    return "a whole frame"


def _verify_model(path: str) -> str:
    """Decode all parts of a packed file, check their digests, and return a line that describes the file."""
    from codec.files.reading import PackedFile, each_part, open_model

    with closing(open_model(path)) as model:
        if not isinstance(model, PackedFile):
            raise ArgumentError(
                f"{printable(path)} is a .safetensors file, which has no checksums to verify: codec pack writes a file "
                "with checksums"
            )
        each_part(model, lambda part, values: None, None)
        return f"a whole packed file of {len(model.header.tensors)} tensors"
