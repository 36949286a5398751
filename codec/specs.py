"""Specs: a frozen dataclass for each codec, with its parameters.

One file: most of it documents the parameters of the specs, which refer to each other.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from codec.arguments import float32, plain, shown
from codec.errors import ArgumentError, SpecError

Model = Literal["auto", "flat", "separable"]
SignScale = Literal["l1", "l2", "two_mean"]
Packing = Literal["2bit", "base3", "entropy"]
Format8 = Literal["e4m3fn", "e5m2", "mxfp8_e4m3", "mxfp8_e5m2"]
Format4 = Literal["nvfp4", "mxfp4"]
Levels = Literal["even", "odd"]
Rounding = Literal["nearest", "stochastic"]
Cut = Literal["nearest", "truncate"]
LevelCoding = Literal["plane", "coded", "shared"]
Granularity = Literal["six", "bit"]
Guard = Literal["exact", "near", "feedback", "max"]
Nonfinite = Literal["error", "propagate"]
Preset = Literal["lossless", "near", "balanced", "small", "smallest"]


def _one_of(name: str, value: object, choices: object) -> None:
    if not isinstance(value, str) or value not in get_args(choices):
        raise SpecError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {shown(value)}")


def _whole(name: str, value: object, least: int, most: int, or_else: str = "") -> None:
    if type(value) is not int or not least <= value <= most:
        raise SpecError(f"{name} must be {or_else}an int from {least} to {most}, got {shown(value)}")


def _store_plain(spec: "Spec", *names: str) -> None:
    """Convert numbers such as numpy scalars to Python's int and float, so that equal specs compare and print equal."""
    for name in names:
        object.__setattr__(spec, name, plain(getattr(spec, name)))


def _positive(name: str, value: object, or_else: str = "") -> None:
    if value is None:
        return
    single = float32(value)
    if single is None or not 0 < single < float("inf"):
        what = f"{or_else}a positive number or None" if single is None else f"{or_else}positive and finite as float32"
        raise SpecError(f"{name} must be {what}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Spec:
    """Base class of all specs.

    Specs are immutable, hashable and picklable. Two specs are equal if all their fields are equal.
    """

    @property
    def contraction(self) -> bool:
        """True if the codec is a contraction: E||x - C(x)||^2 <= (1 - d) ||x||^2 with d > 0 for every tensor x [1]_.

        C(x) is the decoded tensor; d depends on the spec and the number of values only. Error feedback converges for
        contractions; with other codecs the residual can grow without bound.

        References
        ----------
        .. [1] S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; S. P. Karimireddy et
           al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
        """
        return True


@dataclass(frozen=True, slots=True)
class Lossless(Spec):
    """Lossless coding: every bit is kept, including NaN payloads, signed zeros and subnormals.

    Exponents of floats are coded by a length-limited Huffman coder [1]_, after per-row and per-column offsets have been
    subtracted. Signs and mantissas are stored uncompressed. Integers and float8 are coded byte by byte. All dtypes are
    accepted.

    Parameters
    ----------
    max_code_length : int, default 8
        Longest Huffman code in bits, 2 to 8. A smaller limit gives larger frames.
    model : {"auto", "flat", "separable"}, default "auto"
        Model of the exponents. "flat" codes exponents without offsets. "separable" first subtracts row and column
        offsets, if the shape allows it. "auto" is "separable" if a sample of the tensor shows that offsets shrink the
        frame, otherwise "flat".

    Raises
    ------
    SpecError
        A field has another type or value.

    References
    ----------
    .. [1] L. Larmore, D. Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", JACM 37(3), 1990.
    .. [2] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024.

    Examples
    --------
    >>> grad = np.random.default_rng(0).standard_normal((100, 1000), np.float32)
    >>> frame = codec.encode(grad, codec.Lossless())
    >>> len(frame) / grad.nbytes < 0.84, bool((codec.decode(frame) == grad).all())
    (True, True)
    """

    max_code_length: int = 8
    model: Model = "auto"

    def __post_init__(self) -> None:
        _store_plain(self, "max_code_length")
        _whole("max_code_length", self.max_code_length, 2, 8)
        _one_of("model", self.model, Model)


@dataclass(frozen=True, slots=True)
class Sign(Spec):
    """Sign compression: one bit per value, and one or two float32 scales per group.

    A value decodes to plus or minus the scale of its group. -0 counts as negative, and a group of zeros decodes to
    zeros. Use error feedback with this codec. NaN and Inf are refused; dtypes: float32, bfloat16 and float16.

    Parameters
    ----------
    scale : {"l1", "l2", "two_mean"}, default "l1"
        "l1" is the mean of the group's magnitudes, which gives the least squared error of one scale. "l2" is their root
        mean square. "two_mean" stores two scales, the mean of the positive and the mean of the negative values.
    group_size : int, "row" or None, default None
        Number of consecutive values that share a scale, 1 to 2^31. None: all values of the tensor or segment. "row": a
        group is a row of the last dimension; if such a row has fewer than 64 values, dimensions before it are merged
        into it; a tensor of rank 1 has rows of 1,024. Smaller groups adapt to magnitudes that vary within the tensor,
        and each scale costs 32 bits.

    Raises
    ------
    SpecError
        A field has another type or value.

    Notes
    -----
    Means are computed from float32 sums of 4,096 values. If magnitudes exceed 8e34, such a sum can overflow; the scale
    of "l1" and "two_mean" is then the largest number of the dtype.

    References
    ----------
    .. [1] F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
       Training of Speech DNNs", Interspeech 2014.
    .. [2] H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
       ICML 2021.

    Examples
    --------
    >>> x = np.array([1, -2, 3, -4], np.float32)
    >>> codec.decode(codec.encode(x, codec.Sign()))
    array([ 2.5, -2.5,  2.5, -2.5], dtype=float32)
    >>> codec.decode(codec.encode(x, codec.Sign("two_mean")))
    array([ 2., -3.,  2., -3.], dtype=float32)
    """

    scale: SignScale = "l1"
    group_size: int | Literal["row"] | None = None

    def __post_init__(self) -> None:
        _store_plain(self, "group_size")
        _one_of("scale", self.scale, SignScale)
        if self.group_size is not None and not (isinstance(self.group_size, str) and self.group_size == "row"):
            _whole("group_size", self.group_size, 1, 1 << 31, '"row", None or ')

    @property
    def contraction(self) -> bool:
        """True for "l1" and "two_mean", whose scales minimize the squared error.

        The root mean square of "l2" is too large for sparse tensors: if one of n > 4 values is not zero, the error
        exceeds the norm of the tensor.
        """
        return self.scale != "l2"


@dataclass(frozen=True, slots=True)
class Ternary(Spec):
    """Stochastic ternary quantization: a value x decodes to -s, 0 or s, and to sign(x) s with probability abs(x) / s.

    The decoded tensor is an unbiased estimate unless `clip` is given. NaN and Inf are refused; dtypes: float32,
    bfloat16 and float16.

    Parameters
    ----------
    packing : {"2bit", "base3", "entropy"}, default "2bit"
        "2bit" stores 4 values per byte, "base3" 5 values per byte; "entropy" codes the bytes of "base3", which takes
        0.2 to 0.6 bits per value where most values are zero.
    scale : float, optional
        Scale s, for example the largest magnitude of all ranks: frames with the same scale can be added without
        decoding, by :func:`codec.sum_codes`. The scale is rounded to the tensor's dtype; no magnitude may exceed it,
        and a positive scale must not become 0 or Inf. 0 is allowed for tensors of zeros. None: the largest magnitude of
        the tensor, or of each segment.
    clip : float, optional
        Magnitudes are clipped to this many standard deviations of the tensor (2.5 in [1]_). Clipping makes the error
        smaller, but the estimate biased. None: no clipping.
    seed : int, default 0
        Seed of the random bits, 0 to 2^32 - 1. Ranks, steps and tensors need different ``stream=`` in
        :func:`codec.encode`.

    Raises
    ------
    SpecError
        A field has another type or value. :func:`codec.encode` raises SpecError if a magnitude exceeds `scale`, or if
        `scale` becomes 0 or Inf in the tensor's dtype.

    References
    ----------
    .. [1] W. Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning",
       NeurIPS 2017.

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_normal(10_000, np.float32)
    >>> s = abs(x).max()
    >>> np.unique(codec.decode(codec.encode(x, codec.Ternary()))) / s
    array([-1.,  0.,  1.], dtype=float32)
    """

    packing: Packing = "2bit"
    scale: float | None = None
    clip: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _store_plain(self, "scale", "clip", "seed")
        _one_of("packing", self.packing, Packing)
        if type(self.scale) not in (int, float) or self.scale != 0:
            _positive("scale", self.scale, "0, ")
        _positive("clip", self.clip)
        _whole("seed", self.seed, 0, (1 << 32) - 1)

    @property
    def contraction(self) -> bool:
        """False: a value's variance is s abs(x) - x^2, and the sum over all values can exceed the squared norm."""
        return False


@dataclass(frozen=True, slots=True)
class Float8(Spec):
    """8-bit floats with a scale per group, which maps the group's largest magnitude to the format's largest number.

    MXFP8 is the format of the OCP specification [3]_: the same floats, with a power of two as scale. Dtypes: float32,
    bfloat16 and float16.

    Parameters
    ----------
    format : {"e4m3fn", "e5m2", "mxfp8_e4m3", "mxfp8_e5m2"}, default "e4m3fn"
        "e4m3fn" has 3 bits of mantissa and numbers up to 448; "e5m2" has 2 bits and numbers up to 57,344, for groups
        with a wide range of magnitudes. "mxfp8_e4m3" and "mxfp8_e5m2" have the same numbers, and a power of two (e8m0)
        per 32 values as scale: 8.25 bits per value.
    group_size : int, optional
        Number of consecutive values that share a scale, 1 to 2^31; with `entropy` at most 16,384. None: a group is a
        row of the last dimension; if such a row has fewer than 64 values, dimensions before it are merged into it; a
        tensor of rank 1 has rows of 1,024. A scale takes 32 bits. MXFP8 always has groups of 32.
    rounding : {"nearest", "stochastic"}, default "nearest"
        "nearest" rounds to nearest even; "stochastic" rounds to one of the two neighbours, without bias. MXFP8:
        "stochastic" computes scales as ``scale="rceil"`` does; with "nearest", values above 1.75 * 2^e saturate unless
        `scale` is "rceil". 2^e is the power of two at or below the group's largest magnitude.
    nonfinite : {"error", "propagate"}, default "error"
        "error" refuses NaN and Inf; "propagate" decodes both as NaN and leaves other values of the group unaffected.
    scale : float or "rceil", optional
        Factor by which all values are multiplied before rounding, instead of one computed for each group; products
        beyond the format's range saturate. MXFP8 accepts only "rceil" or None. "rceil" doubles the scale of groups
        whose largest magnitude would saturate, which lowers the error (torchao's mode RCEIL). None follows the OCP
        specification (torchao's mode FLOOR).
    entropy : bool, default False
        True: entropy-code the bytes, for smaller frames at lower speed.
    seed : int, default 0
        Seed of stochastic rounding, 0 to 2^32 - 1.

    Raises
    ------
    SpecError
        A field has another type or value.

    References
    ----------
    .. [1] P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
    .. [2] torchft, "quantized all-reduce", github.com/pytorch/torchft pull request 194.
    .. [3] Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.

    Examples
    --------
    >>> grad = np.random.default_rng(0).standard_normal((100, 1000), np.float32)
    >>> frame = codec.encode(grad, codec.Float8(group_size=128))
    >>> float(np.linalg.norm(codec.decode(frame) - grad) / np.linalg.norm(grad)) < 0.03
    True
    >>> codec.decode(codec.encode(np.array([0.5, -2.4, 3, -6], np.float32), codec.Float8("mxfp8_e4m3")))
    array([ 0.5, -2.5,  3. , -6. ], dtype=float32)
    """

    format: Format8 = "e4m3fn"
    group_size: int | None = None
    rounding: Rounding = "nearest"
    nonfinite: Nonfinite = "error"
    scale: float | Literal["rceil"] | None = None
    entropy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _store_plain(self, "group_size", "scale", "seed")
        _one_of("format", self.format, Format8)
        if self.is_mx:
            self._check_mx()
        elif self.group_size is not None:
            _whole("group_size", self.group_size, 1, 1 << 31)
        _one_of("rounding", self.rounding, Rounding)
        _one_of("nonfinite", self.nonfinite, Nonfinite)
        if not self.is_mx:
            _positive("scale", self.scale)
        if type(self.entropy) is not bool:
            raise SpecError(f"entropy must be True or False, got {shown(self.entropy)}")
        _whole("seed", self.seed, 0, (1 << 32) - 1)

    def _check_mx(self) -> None:
        """Check the fields that an MXFP8 format fixes, and set the group size to 32."""
        if self.group_size not in (None, 32):
            raise SpecError(f"group_size must be 32 or None for format={self.format!r}, got {shown(self.group_size)}")
        if self.scale is not None and not (isinstance(self.scale, str) and self.scale == "rceil"):
            raise SpecError(f'scale must be "rceil" or None for format={self.format!r}, got {shown(self.scale)}')
        if self.scale and self.rounding == "stochastic":
            raise SpecError(
                'scale must be None with rounding="stochastic", which always computes scales as "rceil" does, got '
                '"rceil"'
            )
        object.__setattr__(self, "group_size", 32)

    @property
    def is_mx(self) -> bool:
        """True for MXFP8: groups of 32 whose scales are powers of two."""
        return self.format.startswith("mxfp8")

    @property
    def contraction(self) -> bool:
        """True unless `scale` is a number: a small factor can round a whole tensor to zero."""
        return self.scale is None or self.is_mx


@dataclass(frozen=True, slots=True)
class Float4(Spec):
    """4-bit floats (e2m1) with a one-byte scale per 16 or 32 values. NaN and Inf are refused.

    Dtypes: float32, bfloat16 and float16.

    Parameters
    ----------
    format : {"nvfp4", "mxfp4"}, default "nvfp4"
        "nvfp4" has an e4m3fn scale per 16 values, and a float32 scale per tensor or segment: 4.5 bits per value.
        "mxfp4" has a power of two as scale per 32 values: 4.25 bits per value, with a larger error.
    rounding : {"nearest", "stochastic"}, default "nearest"
        "nearest" rounds to nearest even; values above 6 times their scale saturate. "stochastic" rounds to one of the
        two neighbours, without bias; scales are rounded up.
    seed : int, default 0
        Seed of stochastic rounding, 0 to 2^32 - 1.

    Raises
    ------
    SpecError
        A field has another type or value.

    References
    ----------
    .. [1] Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
    .. [2] NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.

    Examples
    --------
    >>> x = np.array([0.5, -2.4, 3, -6], np.float32)
    >>> codec.decode(codec.encode(x, codec.Float4("mxfp4")))
    array([ 0.5, -2. ,  3. , -6. ], dtype=float32)
    """

    format: Format4 = "nvfp4"
    rounding: Rounding = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        _store_plain(self, "seed")
        _one_of("format", self.format, Format4)
        _one_of("rounding", self.rounding, Rounding)
        _whole("seed", self.seed, 0, (1 << 32) - 1)


@dataclass(frozen=True, slots=True)
class Quantize(Spec):
    """Integers of 1 to 8 bits: evenly spaced levels between plus and minus the largest magnitude of a group.

    With a zero point, levels lie between the smallest and the largest value of a group. A group of zeros decodes to
    zeros; with a zero point, a group of equal values is exact. NaN and Inf are refused; dtypes: float32, bfloat16 and
    float16.

    Parameters
    ----------
    bits : int, default 4
        Bits per value, 1 to 8.
    group_size : int, default 64
        Number of values that share a scale, 1 to 2^31, consecutive in the last dimension. For groups along another
        dimension, encode a transposed view. A scale takes 32 bits, so groups of 64 add 0.5 bits per value; larger
        groups cost less and have a larger error.
    levels : {"even", "odd"}, default "even"
        "even" has 2^bits levels, none of which is zero, as in [1]_; "odd" has 2^bits - 1 levels, one of which is zero,
        for tensors with many zeros. "odd" needs 2 bits or more.
    rounding : {"stochastic", "nearest"}, default "stochastic"
        "stochastic" rounds to one of the two neighbouring levels, without bias; "nearest" rounds to the nearest level,
        ties away from zero ("odd") or up ("even").
    seed : int, default 0
        Seed of stochastic rounding, 0 to 2^32 - 1.
    zero_point : bool, default False
        Space 2^bits levels between the smallest and the largest value of a group, as in [2]_. Use it for groups whose
        values lie on one side of zero, such as activations and KV caches. The smallest and the largest value of each
        group are sent in the tensor's dtype, which takes 32 bits per group, as much as a scale, or 64 bits for float32
        tensors. `levels` must be "even".

    Raises
    ------
    SpecError
        A field has another type or value, or `levels` is "odd" with 1 bit or with a zero point.

    References
    ----------
    .. [1] J. Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Quantization with
       Guarantees", NeurIPS 2022.
    .. [2] Z. Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024.

    Examples
    --------
    >>> x = np.array([1, -2, 3, -4], np.float32)
    >>> codec.decode(codec.encode(x, codec.Quantize(4, levels="odd", rounding="nearest")))
    array([ 1.1428572, -2.2857144,  2.857143 , -4.       ], dtype=float32)
    >>> codec.decode(codec.encode(x + 100, codec.Quantize(4, rounding="nearest", zero_point=True)))
    array([101.13333,  97.86667, 103.     ,  96.     ], dtype=float32)
    >>> codec.Quantize(9)
    Traceback (most recent call last):
    codec.errors.SpecError: bits must be an int from 1 to 8, got 9
    """

    bits: int = 4
    group_size: int = 64
    levels: Levels = "even"
    rounding: Rounding = "stochastic"
    seed: int = 0
    zero_point: bool = False

    def __post_init__(self) -> None:
        _store_plain(self, "bits", "group_size", "seed", "zero_point")
        _whole("bits", self.bits, 1, 8)
        _whole("group_size", self.group_size, 1, 1 << 31)
        _one_of("levels", self.levels, Levels)
        _one_of("rounding", self.rounding, Rounding)
        _whole("seed", self.seed, 0, (1 << 32) - 1)
        if self.levels == "odd" and self.bits < 2:
            raise SpecError(f'levels="odd" needs bits of 2 or more, got {self.bits}')
        if type(self.zero_point) is not bool:
            raise SpecError(f"zero_point must be True or False, got {shown(self.zero_point)}")
        if self.zero_point and self.levels == "odd":
            raise SpecError('zero_point=True needs levels="even", got "odd"')

    @property
    def contraction(self) -> bool:
        """True if groups are small enough for the number of levels.

        The largest magnitude of a group is exact; the error of all other values is bounded by the distance between
        levels. The squared error of a group of n values is below its squared norm if n - 1 < (2^bits - 1)^2 (even
        levels) or n - 1 < 8 (2^(bits - 1) - 1)^2 (odd levels, stochastic rounding), and for any n with odd levels and
        rounding to nearest. With a zero point, the smallest and the largest value are exact up to rounding, and the
        condition is n - 2 < 2 (2^bits - 1)^2.
        """
        if self.zero_point:
            return self.group_size - 2 < 2 * ((1 << self.bits) - 1) ** 2
        if self.levels == "odd":
            return self.rounding == "nearest" or self.group_size - 1 < 8 * ((1 << self.bits - 1) - 1) ** 2
        return self.group_size - 1 < ((1 << self.bits) - 1) ** 2


@dataclass(frozen=True, slots=True)
class Truncate(Spec):
    """Truncated mantissas: keep only the mantissa bits of a gradient that affect the optimizer's next step.

    Each value loses 0, 6, 12 or 18 mantissa bits (bfloat16: 0, 2, 4, 6; float16: 0, 3, 5, 8), called levels 0 to 3. The
    level of a value is computed from the optimizer and its state, which :meth:`bind` adds, or is the same for all
    values. Exponents are coded losslessly, as in :class:`Lossless`; rounding can carry into the exponent. NaN and Inf
    keep all bits; zeros and subnormals become +0. A tensor that has fewer than 512 values, or that would grow, is
    stored uncompressed. Dtypes: float32, bfloat16 and float16.

    Parameters
    ----------
    level : "optimizer" or int, default "optimizer"
        "optimizer": the level of each value is computed from the optimizer to which the spec is bound. 0 to 3: all
        values have this level, and no optimizer is needed.
    rounding : {"nearest", "truncate"}, default "nearest"
        "nearest" rounds to nearest even; "truncate" rounds towards zero, with up to twice the error.
    level_coding : {"plane", "coded", "shared"}, default "coded"
        How the receiver obtains the levels. "plane": 2 bits per value. "coded": one Huffman code for exponent and
        level. "shared": levels are not sent. The receiver passes a spec bound to the same optimizer and state to
        :func:`codec.decode`, which computes them again; a digest in the frame detects levels that differ.
    granularity : {"six", "bit"}, default "six"
        "six": a value loses one of the four bit counts above. "bit": a value may lose any number of bits; needs
        ``level_coding="shared"``.
    guard : int or {"exact", "near", "feedback", "max"}, default -8
        Safety margin in bits, -128 to 126; not used if `level` is an int. 0 drops the gradient bits whose contribution
        to the step is less than the last mantissa bit of the updated parameter. A positive number keeps that many more
        bits; a negative number drops that many more. "exact" (4; 6 with granularity "bit") leaves nearly all parameters
        bit-identical to training without compression. "near" is -8. "feedback" (-11) is for error feedback
        (``residual=``). "max" means ``level=3``. With momentum mu, a gradient bit also contributes to later steps: add
        log2(1 / (1 - mu)) to keep bits that matter only in the sum of these contributions.
    max_code_length : int, default 8
        Longest code in bits, 2 to 8.

    Raises
    ------
    SpecError
        A field has another type or value, or `granularity` is "bit" and levels are not shared. :func:`codec.encode`
        raises SpecError for a spec with level "optimizer" that is not bound.

    References
    ----------
    .. [1] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024.

    Examples
    --------
    >>> grad = np.random.default_rng(0).standard_normal((100, 1000), np.float32)
    >>> y = codec.decode(codec.encode(grad, codec.Truncate(2)))
    >>> bool((abs(y - grad) <= abs(grad) / 2**12).all())
    True
    """

    level: Literal["optimizer"] | int = "optimizer"
    rounding: Cut = "nearest"
    level_coding: LevelCoding = "coded"
    granularity: Granularity = "six"
    guard: int | Guard = -8
    max_code_length: int = 8

    def __post_init__(self) -> None:
        _store_plain(self, "level", "guard", "max_code_length")
        if not (isinstance(self.level, str) and self.level == "optimizer"):
            _whole("level", self.level, 0, 3, '"optimizer" or ')
        _one_of("rounding", self.rounding, Cut)
        _one_of("level_coding", self.level_coding, LevelCoding)
        _one_of("granularity", self.granularity, Granularity)
        if isinstance(self.guard, str):
            _one_of("guard", self.guard, Guard)
        else:
            _whole("guard", self.guard, -128, 126)
        _whole("max_code_length", self.max_code_length, 2, 8)
        if self.granularity == "bit" and (self.level_coding != "shared" or self.fixed_level is not None):
            raise SpecError(
                'granularity="bit" needs level_coding="shared" and level="optimizer": other codings have four levels '
                "only"
            )

    @property
    def fixed_level(self) -> int | None:
        """Level that all values have; None if the level of each value is computed from an optimizer."""
        if self.guard == "max" and self.level == "optimizer":
            return 3
        return self.level if isinstance(self.level, int) else None

    @property
    def guard_bits(self) -> int:
        """Guard in bits: `guard` if it is an int, otherwise the number that its name stands for."""
        if isinstance(self.guard, int):
            return self.guard
        return {"exact": 6 if self.granularity == "bit" else 4, "feedback": -11}.get(self.guard, -8)

    def bind(
        self, optimizer: Any = None, *, theta: Any = None, m: Any = None, v: Any = None, levels: Any = None
    ) -> "BoundSpec":
        """Bind the spec to the optimizer that will apply the gradient, and to that optimizer's state.

        The bound spec is accepted wherever a spec is. It refers to the given arrays, and each call reads their current
        contents. `optimizer` is a copy of the hyperparameters and the step number: bind again when one of them changes,
        such as `lr` or `step`.

        Parameters
        ----------
        optimizer : codec.optimizers.Optimizer, codec.optimizers.Custom or list of (int, either), optional
            Description of the optimizer's next step, constructed directly or by
            :func:`codec.optimizers.from_optimizer`. A list has an entry for each parameter group inside the tensor: the
            index of the group's first value, and its optimizer. The first index is 0.
        theta, m, v : array or tensor, optional
            Parameters and the optimizer's state before the step, float32, bfloat16 or float16, with as many values as
            the gradient, on the same device. ``m`` is torch's ``momentum_buffer`` or ``exp_avg``, ``v`` its
            ``exp_avg_sq``, ``square_avg`` or ``sum``. Leave out ``m`` and ``v`` for the optimizer's first step.
        levels : array or tensor of uint8, optional
            Level of each value, 0 to 3, instead of an optimizer.

        Returns
        -------
        BoundSpec

        Raises
        ------
        ArgumentError
            Neither or both of `optimizer` and `levels` are given, or `levels` together with an array of state. Calls
            that use the bound spec raise ArgumentError for an optimizer of another type and for arrays of another size
            or dtype, and StateError if `theta` is missing.

        Examples
        --------
        >>> grad, w = np.full(1000, 1e-3, np.float32), np.ones(1000, np.float32)
        >>> spec = codec.Truncate().bind(codec.optimizers.SGD(lr=0.1), theta=w)
        >>> bool(np.allclose(codec.decode(codec.encode(grad, spec)), grad, rtol=1e-2))
        True
        """
        state = {name: x for name, x in (("theta", theta), ("m", m), ("v", v)) if x is not None}
        if (optimizer is None) == (levels is None):
            raise ArgumentError(
                "bind() takes either an optimizer or levels=, got " + ("none" if levels is None else "both")
            )
        if levels is not None and state:
            raise ArgumentError(f"bind(levels=...) takes no state: leave out {', '.join(state)}")
        return BoundSpec(self, optimizer, state, levels)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BoundSpec:
    """A spec with the optimizer and state, or the levels, that encoding and decoding need; from :meth:`Truncate.bind`.

    Attributes
    ----------
    spec : Truncate
        The spec that was bound.
    optimizer : Optimizer, Custom, list of (int, either) or None
        Optimizer given to :meth:`Truncate.bind`; None if `levels` were given.
    state : dict of str to array or tensor
        Arrays given to :meth:`Truncate.bind`, under the keys ``theta``, ``m`` and ``v``.
    levels : array or tensor of uint8, or None
        Level of each value, 0 to 3; None if an optimizer was given.
    """

    spec: Truncate
    optimizer: Any
    state: dict[str, Any]
    levels: Any

    def __repr__(self) -> str:
        given = [shown(self.optimizer)] if self.levels is None else ["levels=..."]
        return f"{self.spec!r}.bind({', '.join([*given, *(f'{name}=...' for name in self.state)])})"


@dataclass(frozen=True, slots=True)
class Delta(Spec):
    """Lossless difference of a tensor from a base that sender and receiver have, such as weights before an update.

    A changed value is coded as the number of representable numbers between old and new value. Positions of changed
    values are coded as gaps, with Golomb-Rice codes [1]_ whose parameter depends on the base's exponents: an
    optimizer's step changes small weights more often than large ones. Every bit is kept, including NaN payloads and
    signed zeros. All dtypes are accepted.

    A frame has digests of the base and of the result, see :func:`codec.digest`. A receiver verifies both before it
    writes the result. If the base differs, or the update is already applied, :func:`codec.decode` raises StateError and
    the tensor is unchanged, even in place. If a tensor equals its base, its frame has 64 bytes plus 8 per dimension.

    Parameters
    ----------
    block_size : int, optional
        Number of values in a block, a power of two from 1,024 to 262,144. Blocks are coded independently and in
        parallel. Smaller blocks let more threads, or a GPU, work on a small tensor, but make frames larger if few
        values change: blocks of 2^16 take 5% more bytes than blocks of 2^17 if 0.3% of the values change. None:
        131,072.

    Raises
    ------
    SpecError
        A field has another type or value.

    References
    ----------
    .. [1] S. Golomb, "Run-length encodings", IEEE Transactions on Information Theory 12(3), 1966; R. Rice, J. Plaunt,
       "Adaptive Variable-Length Coding for Efficient Compression of Spacecraft Television Data", 1971.

    Examples
    --------
    >>> old = np.random.default_rng(0).standard_normal(100_000).astype(np.float16)
    >>> new = old.copy()
    >>> new[::1000] *= 1.001
    >>> frame = codec.encode(new, codec.Delta(), base=old)
    >>> len(frame) / new.nbytes < 0.01, bool((codec.decode(frame, base=old) == new).all())
    (True, True)
    >>> weights = old.copy()
    >>> codec.decode(frame, base=weights, out=weights) is weights and bool((weights == new).all())
    True
    >>> codec.decode(frame, base=weights, out=weights)
    Traceback (most recent call last):
    codec.errors.StateError: already applied: the base equals the frame's result ...
    """

    block_size: int | None = None

    def __post_init__(self) -> None:
        _store_plain(self, "block_size")
        if self.block_size is not None:
            _whole("block_size", self.block_size, 1 << 10, 1 << 18, "None or ")
            if self.block_size & (self.block_size - 1):
                raise SpecError(f"block_size must be a power of two, got {self.block_size}")


@dataclass(frozen=True, slots=True)
class TopK(Spec):
    """Sparsification: keep the values of largest magnitude in each chunk, and decode all others as zero.

    Use it for sparse pseudo-gradients [1]_, with error feedback, which sends dropped values in later frames. By default
    1 value in 64 is kept, and a frame takes 0.158 bits per value of the tensor. If magnitudes are equal, values that
    come first in the chunk are kept. NaN and Inf are refused; dtypes: float32, bfloat16 and float16.

    Parameters
    ----------
    density : float, default 1/64
        Fraction of the values to keep, above 0 and at most 1/2. The number of values kept per chunk, ``kept``, is
        rounded to the nearest integer, and is at least 1. A shorter last chunk keeps the same fraction, rounded up.
    bits : int, default 2
        Bits per kept value including its sign, 1 to 8. With 1 bit, all kept values of a chunk decode to their mean
        magnitude. With more, they decode to 2^(bits - 1) evenly spaced magnitudes between the least and the largest
        kept magnitude of the chunk.
    chunk : int, default 4096
        Number of values in a chunk, a power of two from 64 to 65,536; chunks are consecutive in C order. The scales of
        a chunk take 16 bits if `bits` is 1, otherwise 32.
    rounding : {"nearest", "stochastic"}, default "nearest"
        "nearest" rounds a kept magnitude to the nearest level; "stochastic" rounds it to one of the two neighbours,
        without bias.
    seed : int, default 0
        Seed of stochastic rounding, 0 to 2^32 - 1.

    Raises
    ------
    SpecError
        A field has another type or value.

    References
    ----------
    .. [1] A. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706.
    .. [2] A. F. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.

    Examples
    --------
    >>> x = np.array([1, -2, 3, -4, 0.5, 0.25, 0, 0], np.float32)
    >>> codec.decode(codec.encode(x, codec.TopK(1 / 4, chunk=64)))
    array([ 0.,  0.,  3., -4.,  0.,  0.,  0.,  0.], dtype=float32)
    >>> grad = np.random.default_rng(0).standard_normal(1_000_000, np.float32)
    >>> grad.nbytes // len(codec.encode(grad, codec.TopK()))
    202
    """

    density: float = 1 / 64
    bits: int = 2
    chunk: int = 4096
    rounding: Rounding = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        _store_plain(self, "density", "bits", "chunk", "seed")
        if type(self.density) not in (int, float) or not 0 < self.density <= 1 / 2:
            raise SpecError(f"density must be a number above 0 and at most 1/2, got {shown(self.density)}")
        _whole("bits", self.bits, 1, 8)
        _whole("chunk", self.chunk, 64, 1 << 16, "a power of two, ")
        if self.chunk & (self.chunk - 1):
            raise SpecError(f"chunk must be a power of two, got {self.chunk}")
        _one_of("rounding", self.rounding, Rounding)
        _whole("seed", self.seed, 0, (1 << 32) - 1)

    @property
    def kept(self) -> int:
        """Number of values kept in a chunk of full size."""
        return max(1, round(self.density * self.chunk))

    @property
    def contraction(self) -> bool:
        """True for rounding to nearest, and for 1 bit, which is not rounded.

        With rounding to nearest, the largest value of a chunk is exact; with 1 bit, kept values decode to their mean
        magnitude. Stochastic rounding between levels that are far apart can add an error larger than the values.
        """
        return self.rounding == "nearest" or self.bits == 1


SpecLike = Spec | BoundSpec | Preset

# Spec classes of all codecs, in the order in which messages list them. The C constant of Float8 is CODEC_FLOAT8.
CODECS: tuple[type[Spec], ...] = (Lossless, Delta, Truncate, TopK, Quantize, Float8, Float4, Ternary, Sign)


def require_feedback(spec: Spec, advice: str) -> None:
    """Raise SpecError, with `advice` in the message, if frames of the spec must not be sent without error feedback."""
    if isinstance(spec, TopK):
        raise SpecError(
            f"{spec} drops most values, and needs error feedback, which sends the dropped values later: {advice}"
        )


def check_contraction(spec: Spec) -> None:
    """Raise SpecError, with advice, unless the spec is a lossy contraction, as error feedback requires."""
    if isinstance(spec, Lossless | Delta):
        raise SpecError(f"{type(spec).__name__} has no residual: use error feedback with a lossy spec")
    if spec.contraction:
        return
    advice = "leave scale= out"
    if isinstance(spec, Ternary):
        advice = "leave feedback out, since Ternary is unbiased"
    elif isinstance(spec, TopK):
        advice = 'use rounding="nearest" or bits=1'
    elif isinstance(spec, Sign):
        advice = 'use scale="l1" or "two_mean"'
    elif isinstance(spec, Quantize):
        advice = 'use levels="odd" with rounding="nearest", smaller groups, or more bits; or leave feedback out'
    raise SpecError(f"{spec} is not a contraction, so that error feedback may diverge: {advice}")
