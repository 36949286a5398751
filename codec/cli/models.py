"""Commands ``codec pack``, ``codec unpack`` and ``codec ls``."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from codec import readable
from codec.cli.console import (
    EXIT_CODES,
    STANDARD,
    add_json,
    add_output,
    add_threads,
    check_output,
    input_file,
    output_file,
    print_table,
    progress_bar,
    report,
)
from codec.errors import ArgumentError
from codec.files.opening import printable

_PACKED, _PLAIN, _INDEX = ".codec.safetensors", ".safetensors", ".index.json"


def add_commands(commands: Any) -> None:
    """Add the parsers of the commands ``pack``, ``unpack`` and ``ls`` to the parsers of all commands."""
    p = commands.add_parser(
        "pack",
        help="compress a model file without loss",
        description="Compress a .safetensors, .npz, .npy or .pt file without loss. The result is a .safetensors file "
        "of frames, from which unpack restores the file. Of .npz, .npy and .pt files, the tensors are restored. MODEL "
        f"may be the index of a sharded model, too: -o then names a folder. {EXIT_CODES}",
    )
    p.add_argument("model", help="file of tensors, - for standard input, or model.safetensors.index.json")
    p.add_argument("--key", help="key of the dict of tensors in a .pt file, such as model")
    add_threads(p)
    add_output(p, default="MODEL.codec.safetensors")
    p.set_defaults(run=run_pack)
    p = commands.add_parser(
        "unpack",
        help="restore a model file",
        description="Restore the file that was packed. The suffix of the output chooses the format: .npz and .pt hold "
        f"the tensors; every other name gets the .safetensors file, byte by byte as it was. {EXIT_CODES}",
    )
    p.add_argument("model", help="packed file, - for standard input, or model.safetensors.index.json")
    add_threads(p)
    add_output(p, default="the name without .codec")
    p.set_defaults(run=run_unpack)
    p = commands.add_parser(
        "ls",
        help="list the tensors of a model file",
        description=f"List the tensors of a packed, .safetensors, .npz, .npy or .pt file. {EXIT_CODES}",
    )
    p.add_argument("model", help="file of tensors, or - for standard input")
    p.add_argument("--key", help="key of the dict of tensors in a .pt file")
    add_json(p)
    p.set_defaults(run=run_ls)


def run_pack(args: argparse.Namespace) -> int:
    """Run ``codec pack``: compress a model file, or each file of a sharded model."""
    if args.model.endswith(_INDEX):
        return _each_shard(args, _pack)
    stem = args.model
    for suffix in (_PLAIN, ".npz", ".npy", ".pt", ".pth", ".bin"):
        stem = stem.removesuffix(suffix)
    output = args.output or (STANDARD if args.model == STANDARD else stem + _PACKED)
    output = check_output(output, args.force, args.model)
    return _report(args, output, [_pack(args, args.model, output)])


def run_unpack(args: argparse.Namespace) -> int:
    """Run ``codec unpack``: restore a model file, or each file of a sharded model."""
    if args.model.endswith(_INDEX):
        return _each_shard(args, _unpack)
    output = args.output or (STANDARD if args.model == STANDARD else args.model.removesuffix(_PACKED) + _PLAIN)
    output = check_output(output, args.force, args.model)
    return _report(args, output, [_unpack(args, args.model, output)])


def _pack(args: argparse.Namespace, path: str, output: str) -> tuple[int, int, int]:
    """Compress a file. Return the number of tensors, and the bytes before and after."""
    from codec.files.index import is_container
    from codec.files.packing import pack
    from codec.files.sources import source_of

    with input_file(path) as found, source_of(found, args.key) as source:
        if is_container(source.header):
            raise ArgumentError(f"{printable(path)} is packed already: codec unpack restores the original file")
        with output_file(output, path) as file, progress_bar() as progress:
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
            f"{printable(args.model)} is the index of a sharded model, whose output is a folder: pass -o FOLDER"
        )
    from codec.files.shards import shard_names

    names = shard_names(args.model)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(args.model)
    for name in (source.name, *names):
        check_output(str(folder / name), args.force, str(source.parent / name))
    done = [work(args, str(source.parent / name), str(folder / name)) for name in names]
    with output_file(str(folder / source.name), args.model) as file:
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
    """Run ``codec ls``: list the tensors of a file."""
    with input_file(args.model) as path:
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
