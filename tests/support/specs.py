"""The specs that tests iterate over, by name: all variants of every codec. Other lists are derived from these."""

import codec

# The last spec of a codec stands for the codec in FAMILIES
LOSSY = {
    "sign_l1": codec.Sign(),
    "sign_l2": codec.Sign("l2", 128),
    "sign_two_mean": codec.Sign("two_mean"),
    "sign_row": codec.Sign("two_mean", "row"),
    "ternary_2bit": codec.Ternary(),
    "ternary_entropy": codec.Ternary("entropy"),
    "ternary_clip": codec.Ternary("base3", clip=2.5),
    "ternary_base3": codec.Ternary("base3", seed=7),
    "float8_e4m3fn": codec.Float8(),
    "float8_e5m2": codec.Float8("e5m2", 100, "stochastic"),
    "float8_mxfp8_e4m3": codec.Float8("mxfp8_e4m3"),
    "float8_mxfp8_e5m2": codec.Float8("mxfp8_e5m2", rounding="stochastic"),
    "float8_entropy": codec.Float8(nonfinite="propagate", entropy=True),
    "float4_mxfp4": codec.Float4("mxfp4", "stochastic"),
    "float4_nvfp4": codec.Float4(),
    "quantize_4": codec.Quantize(),
    "quantize_1": codec.Quantize(1, 20000),
    "quantize_7": codec.Quantize(7, 3, "odd", "nearest"),
    "quantize_8": codec.Quantize(8, 3000, "even", "nearest"),
    "quantize_4_zero": codec.Quantize(4, zero_point=True),
    "quantize_8_zero": codec.Quantize(8, 3000, rounding="nearest", zero_point=True),
    "quantize_3_odd": codec.Quantize(3, 50, "odd"),
}

TOPKS = {
    "topk_2": codec.TopK(1 / 16, chunk=512),
    "topk_1": codec.TopK(bits=1),
    "topk_8": codec.TopK(1 / 4, 8, 64, "stochastic", seed=5),
}

TRUNCATES = {
    "truncate_fixed": codec.Truncate(2),
    "truncate_plane": codec.Truncate(level_coding="plane", guard=0),
    "truncate_coded": codec.Truncate(guard=0),
    "truncate_cut": codec.Truncate(rounding="truncate", level_coding="plane", guard="exact"),
    "truncate_shared": codec.Truncate(level_coding="shared", guard=0),
    "truncate_bit": codec.Truncate(level_coding="shared", granularity="bit", guard=0),
}

LOSSLESS = {
    "lossless": codec.Lossless(),
    "lossless_3": codec.Lossless(max_code_length=3),
    "lossless_flat": codec.Lossless(model="flat"),
    "lossless_separable": codec.Lossless(max_code_length=6, model="separable"),
}

# additional variants, for tests that compare engines
MORE = {
    "ternary_scale": codec.Ternary(scale=1024.0),
    "float8_e5m2_nearest": codec.Float8("e5m2", 7, scale=0.5, nonfinite="propagate"),
    "float8_e4m3fn_stochastic": codec.Float8("e4m3fn", 5000, "stochastic", entropy=True),
    "float8_mxfp8_entropy": codec.Float8("mxfp8_e5m2", nonfinite="propagate", scale="rceil", entropy=True),
    "float4_nvfp4_stochastic": codec.Float4("nvfp4", "stochastic"),
    "float4_mxfp4_nearest": codec.Float4("mxfp4"),
    **{f"quantize_{b}_{way}": codec.Quantize(b, 40, way) for b in (2, 5, 6) for way in ("even", "odd")},
    **{f"quantize_{b}_zero": codec.Quantize(b, 40, zero_point=True) for b in (1, 5)},
    "truncate_0": codec.Truncate(0),
    "truncate_3_cut": codec.Truncate(3, "truncate"),
    "truncate_feedback": codec.Truncate(level_coding="shared", guard="feedback"),
}

SPECS = LOSSLESS | LOSSY | TOPKS | TRUNCATES | MORE
# for each codec whose frames need no base and are not sparse, the name of one spec
FAMILIES = ("lossless", *{type(spec): name for name, spec in LOSSY.items()}.values(), "truncate_coded")

# (levels, granularity) of Truncate: all combinations in which levels are computed from a metric and sent
TRUNCATE_LEVELS = [("plane", "six"), ("coded", "six"), ("shared", "six"), ("shared", "bit")]
