"""Commands ``codec pack``, ``codec unpack`` and ``codec ls``: model files, and by :mod:`codec.cli.arrays` frames."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from codec import readable
from codec.cli import arrays
from codec.cli.checkpoints import checkpoint_entries, is_checkpoint, print_checkpoint
from codec.cli.console import (
    EXIT_CODES,
    STANDARD,
    add_json,
    add_output,
    add_threads,
    check_output,
    check_signed,
    input_file,
    output_file,
    print_table,
    progress_bar,
    report,
    signed_output,
)
from codec.cli.packs import is_pack_file, pack_rows
from codec.errors import ArgumentError
from codec.files.opening import HEAD, FileKind, kind_of, kind_of_head, opened, printable, standard_input
from codec.files.signing import SigningKey

_PACKED, _PLAIN, _INDEX = ".codec.safetensors", ".safetensors", ".index.json"


def add_commands(commands: Any) -> None:
    """Add the parsers of the commands ``pack``, ``unpack`` and ``ls`` to the parsers of all commands."""
    p = commands.add_parser(
        "pack",
        help="compress a model file, an array or a stream of values",
        description="Compress a .safetensors, .npz or .pt file without loss. The result is a .safetensors file of "
        "frames, from which unpack restores the file. Of .npz and .pt files, the tensors are restored. FILE may be the "
        "index of a sharded model, too: -o then names a folder. A .npy file, or raw values with --dtype, become a "
        f"frame, which codec.decode takes; raw values without --shape, a frame of every 64 MiB. {EXIT_CODES}",
    )
    p.add_argument(
        "file",
        nargs="?",
        default=STANDARD,
        help="file of tensors, raw values, or model.safetensors.index.json; default: standard input",
    )
    p.add_argument("--key", help="key of the dict of tensors in a .pt file, such as model")
    p.add_argument("--codec", help="of a frame: preset, or spec such as 'Quantize(4)'; default: lossless")
    p.add_argument("--dtype", help="dtype of raw values, such as bfloat16; or of a .npy file that stores bits")
    p.add_argument("--shape", help="shape of raw values, such as 512,1024")
    p.add_argument("--sign", metavar="KEYFILE", help="sign the output with a key, in OUTPUT.sig")
    p.add_argument("--context", metavar="TEXT", help="text that the signature is for, too, such as a name and version")
    add_threads(p)
    add_output(p, default="FILE.codec.safetensors; of a frame: FILE.codec")
    p.set_defaults(run=run_pack)
    p = commands.add_parser(
        "unpack",
        help="restore what pack has written",
        description="Restore the file that was packed. The suffix of the output chooses the format: .npz and .pt hold "
        "the tensors; every other name gets the .safetensors file, byte by byte as it was. Frames become a .npy file "
        f"if its name ends so, or raw values. {EXIT_CODES}",
    )
    p.add_argument(
        "file",
        nargs="?",
        default=STANDARD,
        help="packed file, frames, or model.safetensors.index.json; default: standard input",
    )
    p.add_argument("--npy", action="store_true", help="of frames: write a .npy file whatever its name")
    add_threads(p)
    add_output(p, default="the name without .codec")
    p.set_defaults(run=run_unpack)
    p = commands.add_parser(
        "ls",
        help="list the tensors of a model file or checkpoint",
        description="List the tensors of a pack, or of a packed, .safetensors, .npz, .npy or .pt file, or the items of "
        f"a checkpoint and its base. {EXIT_CODES}",
    )
    p.add_argument("file", help="file of tensors, - for standard input, or folder of a checkpoint")
    p.add_argument("--key", help="key of the dict of tensors in a .pt file")
    add_json(p)
    p.set_defaults(run=run_ls)


def run_pack(args: argparse.Namespace) -> int:
    """Run ``codec pack``: compress a model file, each file of a sharded model, an array, or a stream of values."""
    args.sign = SigningKey.to_sign(args.sign)
    if args.context is not None and args.sign is None:
        raise ArgumentError("--context is part of a signature: pass --sign, too")
    if args.file.endswith(_INDEX):
        return _each_shard(args, _pack)
    kind, whole = _kind_of(args.file), (args.output or "").endswith(_PLAIN)
    tensors = kind in (FileKind.SAFETENSORS, FileKind.NPZ, FileKind.TORCH) and args.file != STANDARD
    if not tensors and (args.dtype is not None or (kind is FileKind.NPY and not whole)):
        return arrays.pack_array(args)
    if kind is FileKind.UNKNOWN:
        raise ArgumentError(
            f"{printable(args.file)} is {kind.value}: for raw values pass --dtype, such as --dtype bfloat16"
        )
    for name in ("codec", "dtype", "shape"):
        if getattr(args, name) is not None:
            raise ArgumentError(
                f"--{name} is for .npy files, and for raw values with --dtype: {printable(args.file)} is "
                f"{'packed without loss' if tensors else kind.value}"
            )
    stem = args.file
    for suffix in (_PLAIN, ".npz", ".pt", ".pth", ".bin"):
        stem = stem.removesuffix(suffix)
    output = args.output or (STANDARD if args.file == STANDARD else stem + _PACKED)
    output = check_output(output, args.force, args.file)
    check_signed(args, output)
    return _report(args, output, [_pack(args, args.file, output)])


def run_unpack(args: argparse.Namespace) -> int:
    """Run ``codec unpack``: restore a model file, each file of a sharded model, or the values of frames."""
    if args.file.endswith(_INDEX):
        return _each_shard(args, _unpack)
    if _kind_of(args.file) in (FileKind.FRAME, FileKind.EMPTY):
        return arrays.unpack_frames(args)
    output = args.output or (STANDARD if args.file == STANDARD else args.file.removesuffix(_PACKED) + _PLAIN)
    output = check_output(output, args.force, args.file)
    return _report(args, output, [_unpack(args, args.file, output)])


def _kind_of(path: str) -> FileKind:
    """Return the format of a file, as far as its first bytes tell it if the file is standard input."""
    if path == STANDARD:
        return kind_of_head(standard_input().peek(HEAD)[:HEAD])
    with opened(path) as fd:
        return kind_of(fd)


def _pack(args: argparse.Namespace, path: str, output: str) -> tuple[int, int, int]:
    """Compress a file. Return the number of tensors, and the bytes before and after."""
    from codec.files.index import is_container
    from codec.files.packing import pack
    from codec.files.sources import source_of

    with input_file(path) as found, source_of(found, args.key) as source:
        if is_container(source.header):
            raise ArgumentError(f"{printable(path)} is packed already: codec unpack restores the original file")
        with signed_output(args, output, path) as file, progress_bar() as progress:
            pack(source, file, threads=args.threads, progress=progress)
            file.flush()
            return len(source.header.tensors), os.stat(found).st_size, os.fstat(file.fileno()).st_size


def _unpack(args: argparse.Namespace, path: str, output: str) -> tuple[int, int, int]:
    """Restore a file. Return the number of tensors, and the bytes before and after."""
    from codec.files.reading import PackedFile, unpack
    from codec.files.restoring import save_npz, save_torch

    with input_file(path) as found, _opened(found) as model:
        if not isinstance(model, PackedFile):
            raise ArgumentError(
                f"{printable(path)} is a .safetensors file that is not packed: there is nothing to unpack"
            )
        with output_file(output, path) as file, progress_bar() as progress:
            if output.endswith(".npz"):
                save_npz(model, file)
            elif output.endswith((".pt", ".pth")):
                save_torch(model, file, args.threads)
            else:
                unpack(model, file.fileno(), threads=args.threads, progress=progress)
            file.flush()
            return len(model.header.tensors), model.nbytes, os.fstat(file.fileno()).st_size


def _opened(path: str) -> Any:
    from contextlib import closing

    from codec.files.reading import open_model

    return closing(open_model(path))


def _each_shard(args: argparse.Namespace, work: Callable[..., tuple[int, int, int]]) -> int:
    """Pack or unpack the files of a sharded model into a folder, under the same names, and copy the index."""
    if args.output is None or args.output == STANDARD:
        raise ArgumentError(
            f"{printable(args.file)} is the index of a sharded model, whose output is a folder: pass -o FOLDER"
        )
    from codec.files.shards import shard_names

    names = shard_names(args.file)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(args.file)
    for name in (source.name, *names):
        check_signed(args, check_output(str(folder / name), args.force, str(source.parent / name)))
    done = [work(args, str(source.parent / name), str(folder / name)) for name in names]
    with signed_output(args, str(folder / source.name), args.file) as file:
        file.write(source.read_bytes())
    return _report(args, args.output, done)


def _report(args: argparse.Namespace, output: str, done: list[tuple[int, int, int]]) -> int:
    tensors, before, after = (sum(column) for column in zip(*done, strict=True))
    entries = {"file": output, "tensors": tensors, "input_nbytes": before, "output_nbytes": after}
    args.output = output
    count = readable.count(tensors, "tensor")
    share = f" ({100 * after / before:.1f}%)" if after < before else ""
    report(args, entries, f"{output}: {count}, {readable.size(before)} to {readable.size(after)}{share}")
    return 0


def run_ls(args: argparse.Namespace) -> int:
    """Run ``codec ls``: list the tensors of a file, or the items of a checkpoint."""
    if is_checkpoint(args.file):
        entries = checkpoint_entries(args.file)
        if args.json:
            print(json.dumps(entries, indent=1))
        else:
            print_checkpoint(entries)
        return 0
    with input_file(args.file) as path:
        rows = _tensors(path, args.key)
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    table = [[r["name"], r["dtype"], "x".join(map(str, r["shape"])) or "scalar", readable.size(r["nbytes"]),
              f"{100 * r['ratio']:.1f}%", r["stored"]] for r in rows]  # fmt: skip
    total, stored = sum(r["nbytes"] for r in rows), sum(r["nbytes"] * r["ratio"] for r in rows)
    count = readable.count(len(rows), "tensor")
    table.append([count, "", "", readable.size(total), f"{100 * stored / max(1, total):.1f}%", ""])
    print_table(["name", "dtype", "shape", "size", "stored", "as"], table, left=(0, 5))
    return 0


def _tensors(path: str, key: str | None) -> list[dict[str, Any]]:
    """Return name, dtype, shape, size and coding of each tensor of a file, in the order of the header."""
    from codec.files.index import is_container
    from codec.files.sources import source_of

    if is_pack_file(path):
        return pack_rows(path)
    with source_of(path, key) as source:
        header = source.header
    packed: dict[str, tuple[float, str]] = {}
    if is_container(header):
        with _opened(path) as model:
            header = model.header
            packed = {t.name: _stored(model, k) for k, t in enumerate(header.tensors)}
    by_name = {t.name: t for t in header.tensors}
    return [
        {"name": n, "dtype": t.dtype, "shape": list(t.shape), "nbytes": t.nbytes, "ratio": ratio, "stored": how}
        for n in header.names
        for t in [by_name[n]]
        for ratio, how in [packed.get(n, (1.0, "bytes"))]
    ]


def _stored(model: Any, k: int) -> tuple[float, str]:
    """Return the ratio of a tensor's stored to its uncompressed size, and a text that describes how it is stored."""
    if k in model.index.equal:
        return 0.0, f"equal to {model.header.tensors[model.index.equal[k]].name}"
    parts = model.index.stored_as(k)
    codings = Counter(p.coding for p in parts)
    how = ", ".join(codings)
    if len(parts) == 1 and len(parts[0].tensors) > 1:
        others = len(parts[0].tensors) - 1
        how += f", with {others} other" + "s" * (others > 1)
    return sum(p.nbytes for p in parts) / max(1, sum(p.size for p in parts)), how
