"""Conversion between specs and the C library's struct codec_spec."""

from collections.abc import Callable
from typing import Any, get_args

from codec import specs
from codec._c.library import ffi, lib
from codec.arguments import shown
from codec.errors import SpecError
from codec.specs import CODECS, Delta, Float4, Float8, Lossless, Quantize, Sign, Spec, Ternary, TopK, Truncate

Fields = dict[str, Any]

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
        kind = next((kind for kind in _PAIRS if isinstance(spec, kind)), None)
        if kind is None:
            raise SpecError(f"not a spec: {shown(spec)}; {spec_hint(spec)}")
        fields = {"struct_nbytes": ffi.sizeof("codec_spec"), "codec": NUMBERS[kind], **_PAIRS[kind][0](spec)}
        struct = ffi.new("codec_spec *", fields)
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


def _stochastic(spec: Float8 | Float4 | Quantize | TopK) -> int:
    return (spec.rounding == "stochastic") * lib.CODEC_OPTION_STOCHASTIC


def _rounding(s: Any) -> specs.Rounding:
    return "stochastic" if s.options & lib.CODEC_OPTION_STOCHASTIC else "nearest"


# For each codec, a pair of functions. The first returns the fields of ``codec_spec`` for a spec, except `codec`; fields
# left out are 0. The second returns the spec for a struct; seed, scale and clip, which frames do not contain, have
# their defaults.


def _from_lossless(spec: Lossless) -> Fields:
    return {"max_code_length": spec.max_code_length, "model": _index(specs.Model, spec.model)}


def _to_lossless(s: Any) -> Lossless:
    return Lossless(s.max_code_length, get_args(specs.Model)[s.model])


def _from_sign(spec: Sign) -> Fields:
    row = lib.CODEC_GROUP_SIZE_ROW if spec.group_size == "row" else spec.group_size or 0
    return {"variant": _index(specs.SignScale, spec.scale), "group_size": row}


def _to_sign(s: Any) -> Sign:
    is_row = s.group_size == lib.CODEC_GROUP_SIZE_ROW
    return Sign(get_args(specs.SignScale)[s.variant], "row" if is_row else s.group_size or None)


def _from_ternary(spec: Ternary) -> Fields:
    options = lib.CODEC_OPTION_ZERO_SCALE if spec.scale == 0 else 0
    fields = {"scale": spec.scale or 0, "clip": spec.clip or 0, "seed": spec.seed, "options": options}
    return {"variant": _index(specs.Packing, spec.packing), **fields}


def _to_ternary(s: Any) -> Ternary:
    return Ternary(get_args(specs.Packing)[s.variant])


def _from_float8(spec: Float8) -> Fields:
    return {
        "variant": _index(specs.Format8, spec.format),
        "group_size": spec.group_size or 0,
        "options": _stochastic(spec)
        | (spec.nonfinite == "propagate") * lib.CODEC_OPTION_PROPAGATE
        | spec.entropy * lib.CODEC_OPTION_ENTROPY
        | (spec.scale == "rceil") * lib.CODEC_OPTION_RCEIL,
        "scale": 0 if spec.scale == "rceil" else spec.scale or 0,
        "seed": spec.seed,
    }


def _to_float8(s: Any) -> Float8:
    return Float8(
        get_args(specs.Format8)[s.variant],
        _group_size(s) or None,
        _rounding(s),
        "propagate" if s.options & lib.CODEC_OPTION_PROPAGATE else "error",
        "rceil" if s.options & lib.CODEC_OPTION_RCEIL else None,
        entropy=bool(s.options & lib.CODEC_OPTION_ENTROPY),
    )


def _from_float4(spec: Float4) -> Fields:
    return {"variant": _index(specs.Format4, spec.format), "options": _stochastic(spec), "seed": spec.seed}


def _to_float4(s: Any) -> Float4:
    return Float4(get_args(specs.Format4)[s.variant], _rounding(s))


def _from_quantize(spec: Quantize) -> Fields:
    return {
        "variant": lib.CODEC_LEVELS_AFFINE if spec.zero_point else _index(specs.Levels, spec.levels),
        "bits": spec.bits,
        "group_size": spec.group_size,
        "options": _stochastic(spec),
        "seed": spec.seed,
    }


def _to_quantize(s: Any) -> Quantize:
    levels: specs.Levels = "odd" if s.variant == lib.CODEC_LEVELS_ODD else "even"
    affine = s.variant == lib.CODEC_LEVELS_AFFINE
    return Quantize(s.bits, _group_size(s) or 64, levels, _rounding(s), zero_point=affine)


def _from_truncate(spec: Truncate) -> Fields:
    options = (spec.rounding == "truncate") * lib.CODEC_OPTION_CUT
    if spec.fixed_level is not None:
        how = {"variant": lib.CODEC_LEVEL_CODING_FIXED, "bits": spec.fixed_level}
    else:
        options |= (spec.granularity == "bit") * lib.CODEC_OPTION_BITS
        how = {"variant": _index(specs.LevelCoding, spec.level_coding), "guard": spec.guard_bits}
    return {"max_code_length": spec.max_code_length, "options": options, **how}


def _to_truncate(s: Any) -> Truncate:
    cut: specs.Cut = "truncate" if s.options & lib.CODEC_OPTION_CUT else "nearest"
    if s.variant == lib.CODEC_LEVEL_CODING_FIXED:
        return Truncate(s.bits, cut, max_code_length=s.max_code_length)
    granularity: specs.Granularity = "bit" if s.options & lib.CODEC_OPTION_BITS else "six"
    level_coding = get_args(specs.LevelCoding)[s.variant]
    return Truncate("optimizer", cut, level_coding, granularity, s.guard, s.max_code_length)


def _from_delta(spec: Delta) -> Fields:
    return {"group_size": spec.block_size or 0}


def _to_delta(s: Any) -> Delta:
    return Delta(s.group_size or None)


def _from_topk(spec: TopK) -> Fields:
    fields = {"bits": spec.bits, "group_size": spec.chunk, "kept": spec.kept, "seed": spec.seed}
    return {"options": _stochastic(spec), **fields}


def _to_topk(s: Any) -> TopK:
    if not s.group_size:  # a stored frame does not contain these fields
        return TopK(bits=s.bits, rounding=_rounding(s))
    return TopK(s.kept / s.group_size, s.bits, s.group_size, _rounding(s))


def _group_size(s: Any) -> int:
    """Return the size of the groups; 0 if group sizes differ between segments."""
    return s.group_size if s.group_size != lib.CODEC_GROUP_SIZE_ROW else 0


_PAIRS: dict[type[Spec], tuple[Callable[[Any], Fields], Callable[[Any], Spec]]] = {
    Lossless: (_from_lossless, _to_lossless),
    Sign: (_from_sign, _to_sign),
    Ternary: (_from_ternary, _to_ternary),
    Float8: (_from_float8, _to_float8),
    Float4: (_from_float4, _to_float4),
    Quantize: (_from_quantize, _to_quantize),
    Truncate: (_from_truncate, _to_truncate),
    Delta: (_from_delta, _to_delta),
    TopK: (_from_topk, _to_topk),
}
_BY_NUMBER = {NUMBERS[kind]: to_spec for kind, (_, to_spec) in _PAIRS.items()}


def spec_of(struct: Any) -> Spec:
    """Convert a codec_spec to a spec; seed, scale and clip, which frames do not contain, have their defaults."""
    return _BY_NUMBER[struct.codec](struct)
