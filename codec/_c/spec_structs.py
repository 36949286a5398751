"""Conversion between specs and the C library's struct codec_spec."""

from typing import Any, get_args

from codec import specs
from codec._c.library import ffi, lib
from codec.arguments import shown
from codec.errors import SpecError
from codec.specs import CODECS, Spec

NUMBERS: dict[type[Spec], int] = {kind: getattr(lib, f"CODEC_{kind.__name__.upper()}") for kind in CODECS}

_spec_structs: dict[Spec, Any] = {}
_last: tuple[Any, Any] = (None, None)  # spec and struct of the previous call; most calls pass the same spec again


def spec_struct(spec: Spec) -> Any:
    """Return the C struct ``codec_spec`` for a spec; structs are cached."""
    global _last
    known, struct = _last
    if known is spec:
        return struct
    if not isinstance(spec, Spec):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"not a spec: {shown(spec)}; {spec_hint(spec)}")
    struct = _spec_structs.get(spec)
    if struct is None:
        fields = _fields_of(spec)
        struct = ffi.new("codec_spec *")
        struct.struct_nbytes = ffi.sizeof("codec_spec")
        struct.codec = next(number for kind, number in NUMBERS.items() if isinstance(spec, kind))
        for name, value in fields.items():
            setattr(struct, name, value)
        if len(_spec_structs) > 1000:  # seeds or scales may differ in each call: keep the cache small
            _spec_structs.clear()
        _spec_structs[spec] = struct
    _last = spec, struct
    return struct


def spec_hint(given: object) -> str:
    """Return advice, such as "write codec.Sign()", for an error message about an object that is not a spec."""
    name = given.__name__ if isinstance(given, type) else given if isinstance(given, str) else ""
    name = name.lower().partition("(")[0].rpartition(".")[2]
    meant = [kind for kind in CODECS if kind.__name__.lower() == name]
    calls = [f"codec.{kind.__name__}()" for kind in meant or CODECS]
    return f"write {calls[0]}" if meant else f"write {', '.join(calls[:-1])} or {calls[-1]}"


def _index(choices: Any, value: object) -> int:
    return get_args(choices).index(value)


def _fields_of(spec: Spec) -> dict[str, Any]:
    """Return the fields of ``codec_spec`` for a spec, except the field ``codec``; fields left out are 0."""
    match spec:
        case specs.Lossless(max_code_length, model):
            return {"max_code_length": max_code_length, "model": _index(specs.Model, model)}
        case specs.Sign(scale, group_size):
            row = lib.CODEC_GROUP_SIZE_ROW if group_size == "row" else group_size or 0
            return {"variant": _index(specs.SignScale, scale), "group_size": row}
        case specs.Ternary(packing, scale, clip, seed):
            return {
                "variant": _index(specs.Packing, packing),
                "scale": scale or 0,
                "clip": clip or 0,
                "seed": seed,
                **({"options": lib.CODEC_OPTION_ZERO_SCALE} if scale == 0 else {}),
            }
        case specs.Float8(format, group_size, rounding, nonfinite, scale, entropy, seed):
            return {
                "variant": _index(specs.Format8, format),
                "group_size": group_size or 0,
                "options": (rounding == "stochastic") * lib.CODEC_OPTION_STOCHASTIC
                | (nonfinite == "propagate") * lib.CODEC_OPTION_PROPAGATE
                | entropy * lib.CODEC_OPTION_ENTROPY
                | (scale == "rceil") * lib.CODEC_OPTION_RCEIL,
                "scale": 0 if scale == "rceil" else scale or 0,
                "seed": seed,
            }
        case specs.Float4(format, rounding, seed):
            options = (rounding == "stochastic") * lib.CODEC_OPTION_STOCHASTIC
            return {"variant": _index(specs.Format4, format), "options": options, "seed": seed}
        case specs.Quantize(bits, group_size, levels, rounding, seed, zero_point):
            return {
                "variant": lib.CODEC_LEVELS_AFFINE if zero_point else _index(specs.Levels, levels),
                "bits": bits,
                "group_size": group_size,
                "options": (rounding == "stochastic") * lib.CODEC_OPTION_STOCHASTIC,
                "seed": seed,
            }
        case specs.Truncate(_, rounding, level_coding, granularity, _, max_code_length):
            options = (rounding == "truncate") * lib.CODEC_OPTION_CUT
            if spec.fixed_level is not None:
                how = {"variant": lib.CODEC_LEVEL_CODING_FIXED, "bits": spec.fixed_level}
            else:
                options |= (granularity == "bit") * lib.CODEC_OPTION_BITS
                how = {"variant": _index(specs.LevelCoding, level_coding), "guard": spec.guard_bits}
            return {"max_code_length": max_code_length, "options": options, **how}
        case specs.TopK(_, bits, chunk, rounding, seed):
            return {
                "bits": bits,
                "group_size": chunk,
                "kept": spec.kept,
                "options": (rounding == "stochastic") * lib.CODEC_OPTION_STOCHASTIC,
                "seed": seed,
            }
        case specs.Delta(block_size):
            return {"group_size": block_size or 0}
        case _:
            raise SpecError(f"not a spec: {shown(spec)}; {spec_hint(spec)}")


def spec_of(struct: Any) -> Spec:
    """Convert a codec_spec to a spec; seed, scale and clip, which frames do not contain, have their defaults."""
    if struct.codec == lib.CODEC_DELTA:
        return specs.Delta(struct.group_size or None)
    stochastic: specs.Rounding = "stochastic" if struct.options & lib.CODEC_OPTION_STOCHASTIC else "nearest"
    variant = struct.variant
    # group_size is 0 if group sizes differ between segments
    row = struct.group_size if struct.group_size != lib.CODEC_GROUP_SIZE_ROW else 0
    if struct.codec == lib.CODEC_SIGN:
        return specs.Sign(get_args(specs.SignScale)[variant], "row" if struct.group_size and not row else row or None)
    if struct.codec == lib.CODEC_TERNARY:
        return specs.Ternary(get_args(specs.Packing)[variant])
    if struct.codec == lib.CODEC_FLOAT8:
        return specs.Float8(
            get_args(specs.Format8)[variant],
            row or None,
            stochastic,
            "propagate" if struct.options & lib.CODEC_OPTION_PROPAGATE else "error",
            "rceil" if struct.options & lib.CODEC_OPTION_RCEIL else None,
            entropy=bool(struct.options & lib.CODEC_OPTION_ENTROPY),
        )
    if struct.codec == lib.CODEC_FLOAT4:
        return specs.Float4(get_args(specs.Format4)[variant], stochastic)
    if struct.codec == lib.CODEC_QUANTIZE:
        affine = variant == lib.CODEC_LEVELS_AFFINE
        levels: specs.Levels = "odd" if variant == lib.CODEC_LEVELS_ODD else "even"
        return specs.Quantize(struct.bits, row or 64, levels, stochastic, zero_point=affine)
    if struct.codec == lib.CODEC_TOPK:
        if not struct.group_size:  # a stored frame does not contain these fields
            return specs.TopK(bits=struct.bits, rounding=stochastic)
        return specs.TopK(struct.kept / struct.group_size, struct.bits, struct.group_size, stochastic)
    if struct.codec == lib.CODEC_TRUNCATE:
        cut: specs.Cut = "truncate" if struct.options & lib.CODEC_OPTION_CUT else "nearest"
        if struct.variant == lib.CODEC_LEVEL_CODING_FIXED:
            return specs.Truncate(struct.bits, cut, max_code_length=struct.max_code_length)
        granularity: specs.Granularity = "bit" if struct.options & lib.CODEC_OPTION_BITS else "six"
        level_coding = get_args(specs.LevelCoding)[variant]
        return specs.Truncate("optimizer", cut, level_coding, granularity, struct.guard, struct.max_code_length)
    return specs.Lossless(struct.max_code_length, get_args(specs.Model)[struct.model])
