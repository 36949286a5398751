"""What can be asked of :func:`codec.encode`: one frozen dataclass a codec."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from codec.arguments import float32, plain, shown
from codec.errors import ArgumentError, SpecError

Model = Literal["auto", "flat", "separable"]
SignScale = Literal["l1", "l2", "two_mean"]
Packing = Literal["2bit", "base3", "entropy"]
Format8 = Literal["e4m3fn", "e5m2"]
Format4 = Literal["nvfp4", "mxfp4"]
Levels = Literal["even", "odd"]
Rounding = Literal["nearest", "stochastic"]
Cut = Literal["nearest", "truncate"]
LevelCoding = Literal["plane", "coded", "shared"]
Granularity = Literal["six", "bit"]
Guard = Literal["exact", "near", "feedback", "max"]
Nonfinite = Literal["error", "propagate"]


def _one_of(name: str, value: object, choices: object) -> None:
    if not isinstance(value, str) or value not in get_args(choices):
        raise SpecError(f"{name} must be one of {get_args(choices)}, got {shown(value)}")


def _whole(name: str, value: object, least: int, most: int, or_else: str = "") -> None:
    if type(value) is not int or not least <= value <= most:
        raise SpecError(f"{name} must be {or_else}an int from {least} to {most}, got {shown(value)}")


def _store_plain(spec: "Spec", *names: str) -> None:
    """Numbers as Python's, which specs are printed and compared by."""
    for name in names:
        object.__setattr__(spec, name, plain(getattr(spec, name)))


def _positive(name: str, value: object) -> None:
    if value is None:
        return
    single = float32(value)
    if single is None or not 0 < single < float("inf"):
        what = "a positive number or None" if single is None else "positive and finite as float32"
        raise SpecError(f"{name} must be {what}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Spec:
    """Base of all specs."""

    @property
    def contraction(self) -> bool:
        """True if every tensor loses less than its norm: E||x - C(x)||^2 <= (1 - d) ||x||^2 with some d > 0 [1]_.

        C(x) is what the frame of x decodes to, and d depends on the spec and the number of values alone. Error feedback
        converges for such codecs; with others the residual can grow without bound.

        References
        ----------
        .. [1] S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; S. P. Karimireddy et
           al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
        """
        return True


@dataclass(frozen=True, slots=True)
class Lossless(Spec):
    """Every bit returns: NaN payloads, signed zeros and subnormals included.

    Exponents go through a length-limited Huffman coder, after offsets that a sample of the tensor suggests have been
    taken away; sign and mantissa stay as they are. Integers and float8 are coded byte by byte.

    Parameters
    ----------
    max_code_length : int
        Longest code in bits, 2 to 8.
    model : {"auto", "flat", "separable"}
        Offsets of exponents by row and column: where a sample says that they pay, nowhere, or wherever the shape
        allows.

    Raises
    ------
    SpecError
        For any other value.

    References
    ----------
    .. [1] L. Larmore, D. Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", JACM 37(3), 1990.
    .. [2] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024.
    """

    max_code_length: int = 8
    model: Model = "auto"

    def __post_init__(self) -> None:
        _store_plain(self, "max_code_length")
        _whole("max_code_length", self.max_code_length, 2, 8)
        _one_of("model", self.model, Model)


@dataclass(frozen=True, slots=True)
class Sign(Spec):
    """One bit a value: its sign, and a scale for many.

    A value decodes to plus or minus the scale. -0 and NaN with a set sign bit count as negative, but NaN and Inf are
    refused. Where all values that share a scale are zero they decode to zero. Use it with error feedback. Means are
    made of float32 sums of 4,096 values: where magnitudes lie above 8e34 such a sum may be infinite, and the scale of
    "l1" and "two_mean" the dtype's largest number; that of "l2" is right.

    Parameters
    ----------
    scale : {"l1", "l2", "two_mean"}
        Mean of magnitudes (least squared error), their root mean square, or the two means of the values that are
        positive and negative.
    group_size : int, "row" or None
        Values that share a scale: so many, those of the last dimension, or all of a tensor or segment. A last dimension
        below 64 is taken together with those before it; a vector has rows of 1,024.

    References
    ----------
    .. [1] F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
       Training of Speech DNNs", Interspeech 2014.
    .. [2] H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
       ICML 2021.
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

        The root mean square of "l2" is too large for sparse values: of n values, one of which is not zero, it loses
        more than their norm if n is above 4.
        """
        return self.scale != "l2"


@dataclass(frozen=True, slots=True)
class Ternary(Spec):
    """-s, 0 or s, unbiased: a value x stays with probability abs(x) / s.

    NaN and Inf are refused.

    Parameters
    ----------
    packing : {"2bit", "base3", "entropy"}
        Four values a byte; five; or those through the entropy coder (most values are zero: 0.2 to 0.6 bits a value).
    scale : float, optional
        s, such as the largest magnitude over all ranks: codes made with one s add up as integers. An error if a value
        is larger. Not 0 or Inf as float32, nor in the dtype of the tensor, to which it is rounded. Left out: the
        largest magnitude of the tensor, or of each segment.
    clip : float, optional
        Limit magnitudes to so many standard deviations (the paper: 2.5). Smaller error, but biased.
    seed : int
        Of the random draws, 32 bits. Ranks, steps and tensors need different ``stream=`` in :func:`codec.encode`.

    References
    ----------
    .. [1] W. Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning",
       NeurIPS 2017.
    """

    packing: Packing = "2bit"
    scale: float | None = None
    clip: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _store_plain(self, "scale", "clip", "seed")
        _one_of("packing", self.packing, Packing)
        _positive("scale", self.scale)
        _positive("clip", self.clip)
        _whole("seed", self.seed, 0, (1 << 32) - 1)

    @property
    def contraction(self) -> bool:
        """False: an unbiased ternary value has a variance of s abs(x) - x^2, together far above the norm of x."""
        return False


@dataclass(frozen=True, slots=True)
class Float8(Spec):
    """Eight bits a value, scaled row by row so that the largest magnitude becomes the format's largest number.

    Parameters
    ----------
    format : {"e4m3fn", "e5m2"}
        3 bits of mantissa up to 448, or 2 up to 57344.
    group_size : int, optional
        Values that share a scale. Left out: the last dimension; one below 64 is taken together with those before it; a
        vector has rows of 1,024.
    rounding : {"nearest", "stochastic"}
        To nearest even, or to either neighbour so that the mean is right.
    nonfinite : {"error", "propagate"}
        Refuse NaN and Inf, or decode both as NaN; other values of the row are as exact as without them.
    scale : float, optional
        Multiply by this instead of by 448 / (the row's largest magnitude); larger values saturate.
    entropy : bool
        Put the bytes through the entropy coder.
    seed : int
        Of stochastic rounding, 32 bits.

    References
    ----------
    .. [1] P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
    .. [2] torchft, "quantized all-reduce", github.com/pytorch/torchft pull request 194.
    """

    format: Format8 = "e4m3fn"
    group_size: int | None = None
    rounding: Rounding = "nearest"
    nonfinite: Nonfinite = "error"
    scale: float | None = None
    entropy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _store_plain(self, "group_size", "scale", "seed")
        _one_of("format", self.format, Format8)
        if self.group_size is not None:
            _whole("group_size", self.group_size, 1, 1 << 31)
        _one_of("rounding", self.rounding, Rounding)
        _one_of("nonfinite", self.nonfinite, Nonfinite)
        _positive("scale", self.scale)
        if type(self.entropy) is not bool:
            raise SpecError(f"entropy must be a bool, got {shown(self.entropy)}")
        _whole("seed", self.seed, 0, (1 << 32) - 1)

    @property
    def contraction(self) -> bool:
        """True unless a scale is given, under which a whole tensor may be rounded to zero."""
        return self.scale is None


@dataclass(frozen=True, slots=True)
class Float4(Spec):
    """Four bits a value (e2m1) under scales of one byte. NaN and Inf are refused.

    Parameters
    ----------
    format : {"nvfp4", "mxfp4"}
        Runs of 16 values with an e4m3fn scale under a float32 scale of the tensor or segment, or runs of 32 with a
        power of two.
    rounding : {"nearest", "stochastic"}
        To nearest even, where values above 6 times their scale saturate; or to either neighbour so that the mean is
        right, with scales rounded up.
    seed : int
        Of stochastic rounding, 32 bits.

    References
    ----------
    .. [1] Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
    .. [2] NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
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
    """b bits a value: evenly spaced levels between plus and minus the largest magnitude of a group.

    NaN and Inf are refused; a group of zeros decodes to zeros.

    Parameters
    ----------
    bits : int
        1 to 8.
    group_size : int
        Values that share a scale.
    levels : {"even", "odd"}
        2^bits levels, none of them zero (the paper's), or 2^bits - 1 with zero (2 bits or more): better where many
        values are zero.
    rounding : {"stochastic", "nearest"}
        To either neighbour so that the mean is right, or to the nearest, halves away from zero (odd) or up (even).
    seed : int
        Of stochastic rounding, 32 bits.

    References
    ----------
    .. [1] J. Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Quantization with
       Guarantees", NeurIPS 2022.
    """

    bits: int = 4
    group_size: int = 64
    levels: Levels = "even"
    rounding: Rounding = "stochastic"
    seed: int = 0

    def __post_init__(self) -> None:
        _store_plain(self, "bits", "group_size", "seed")
        _whole("bits", self.bits, 1, 8)
        _whole("group_size", self.group_size, 1, 1 << 31)
        _one_of("levels", self.levels, Levels)
        _one_of("rounding", self.rounding, Rounding)
        _whole("seed", self.seed, 0, (1 << 32) - 1)
        if self.levels == "odd" and self.bits < 2:
            raise SpecError("odd levels need 2 bits or more")

    @property
    def contraction(self) -> bool:
        """True if groups are small enough for the number of levels.

        The largest magnitude of a group is exact, and the others lose at most (h^2) each, h being half a step, or with
        odd levels, which have zero, a fourth of a step's square over 2 more than their own square. So what n values
        lose is below their norm if n - 1 < (2^bits - 1)^2 (even) or n - 1 < 8 (2^(bits - 1) - 1)^2 (odd, stochastic).
        Odd levels and rounding to nearest lose less than the norm of any group.
        """
        if self.levels == "odd":
            return self.rounding == "nearest" or self.group_size - 1 < 8 * ((1 << self.bits - 1) - 1) ** 2
        return self.group_size - 1 < ((1 << self.bits) - 1) ** 2


@dataclass(frozen=True, slots=True)
class Truncate(Spec):
    """Floats with as many bits of mantissa as the optimizer's step can tell apart.

    Each value loses 0, 6, 12 or 18 bits (bfloat16: 0, 2, 4, 6; float16: 0, 3, 5, 8): as many as the next step of the
    optimizer cannot tell, once :meth:`bind` has named it, or as many for all values. Exponents are coded as in
    :class:`Lossless`, and kept to the bit but for rounding; NaN and Inf keep all bits; zeros and subnormals become +0.
    A tensor of fewer than 512 values, and one that would grow, is stored uncompressed.

    Parameters
    ----------
    level : {"optimizer"} or int
        By the optimizer that the spec is bound to, or 0 to 3 for all values.
    rounding : {"nearest", "truncate"}
        To nearest even, or towards zero, with twice the error.
    level_coding : {"plane", "coded", "shared"}
        How the receiver learns levels: 2 bits a value, one code with the exponent, or by computing them from the same
        optimizer and state, which :func:`codec.decode` must then be given. A digest makes sure that they are the same.
    granularity : {"six", "bit"}
        Four levels, or, with shared levels, any number of bits.
    guard : int or {"exact", "near", "feedback", "max"}
        Bits that are kept beyond those that reach the parameter, -128 to 126; negative ones give up its last bits.
        "exact", 4 (6 by the bit), leaves nearly all parameters as they would be; "near" is -8; "feedback", -11, is for
        training that feeds back what is lost (``residual=``) and then ends as without; "max" drops the most from all
        values.
        With momentum mu, bits that must last for many steps need log2(1 / (1 - mu)) more.
    max_code_length : int
        Longest code in bits, 2 to 8.

    References
    ----------
    .. [1] "GComp: Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training", SoCC 2024.
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
                'granularity="bit" needs level_coding="shared" and level="optimizer": other codings send four levels'
            )

    @property
    def fixed_level(self) -> int | None:
        """Level of all values; None if an optimizer decides by value."""
        if self.guard == "max" and self.level == "optimizer":
            return 3
        return self.level if isinstance(self.level, int) else None

    @property
    def guard_bits(self) -> int:
        """`guard` as a number."""
        if isinstance(self.guard, int):
            return self.guard
        return {"exact": 6 if self.granularity == "bit" else 4, "feedback": -11}.get(self.guard, -8)

    def bind(
        self, optimizer: Any = None, *, theta: Any = None, m: Any = None, v: Any = None, levels: Any = None
    ) -> "BoundSpec":
        """Bind the spec to the optimizer whose next step gets the gradient, and to that optimizer's state.

        The result is accepted wherever a spec is. It holds references: arrays are read by each call that uses it, so
        it must be made anew when a number of the optimizer changes, such as `lr` or `step`.

        Parameters
        ----------
        optimizer : codec.optimizers.Optimizer, codec.optimizers.Custom or list of (int, either), optional
            Optimizer of the next step, made by hand or by :func:`codec.optimizers.from_optimizer`. A list has, for
            each parameter group inside of the tensor, the offset of its first value and its optimizer, from 0 on.
        theta, m, v : array or tensor, optional
            Parameters and the optimizer's state before the step, float32, bfloat16 or float16, with as many values as
            the tensor, on its device. ``m`` is torch's ``momentum_buffer`` or ``exp_avg``, ``v`` its ``exp_avg_sq``,
            ``square_avg`` or ``sum``. Without ``m`` and ``v`` it is the first step.
        levels : array or tensor of uint8, optional
            Level of each value, 0 to 3, instead of an optimizer.

        Returns
        -------
        BoundSpec

        Raises
        ------
        ArgumentError
            Neither or both of `optimizer` and `levels` are given, or `levels` and an array of state. Calls raise
            ArgumentError for an optimizer of another type and for arrays of another size or dtype, and StateError if
            `theta` is missing.

        Examples
        --------
        >>> grad, w = np.full(1000, 1e-3, np.float32), np.ones(1000, np.float32)
        >>> spec = codec.Truncate().bind(codec.optimizers.SGD(lr=0.1), theta=w)
        >>> bool(np.allclose(codec.decode(codec.encode(grad, spec)), grad, rtol=1e-2))
        True
        """
        state = {name: x for name, x in (("theta", theta), ("m", m), ("v", v)) if x is not None}
        if (optimizer is None) == (levels is None):
            raise ArgumentError("bind() takes an optimizer or levels=: one of both")
        if levels is not None and state:
            raise ArgumentError(f"bind(levels=...) needs no state, leave out {', '.join(state)}")
        return BoundSpec(self, optimizer, state, levels)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BoundSpec:
    """A spec with the optimizer and state, or the levels, that encoding and decoding need; from :meth:`Truncate.bind`.

    Attributes
    ----------
    spec : Truncate
        The spec that was bound.
    optimizer : Optimizer, Custom, list of (int, either) or None
        As given to :meth:`Truncate.bind`.
    state : dict of str to array or tensor
        Those of ``theta``, ``m`` and ``v`` that were given.
    levels : array or tensor of uint8, or None
        Level of each value.
    """

    spec: Truncate
    optimizer: Any
    state: dict[str, Any]
    levels: Any

    def __repr__(self) -> str:
        given = [shown(self.optimizer)] if self.levels is None else ["levels=..."]
        return f"{self.spec!r}.bind({', '.join([*given, *(f'{name}=...' for name in self.state)])})"


SpecLike = Spec | BoundSpec | str


def check_contraction(spec: Spec) -> None:
    """Raise SpecError, with advice, unless error feedback is of use for a spec and converges."""
    if isinstance(spec, Lossless):
        raise SpecError("Lossless loses nothing that could be fed back")
    if spec.contraction:
        return
    advice = "leave scale= out"
    if isinstance(spec, Ternary):
        advice = "its values are unbiased, leave feedback out"
    elif isinstance(spec, Sign):
        advice = 'use scale="l1" or "two_mean"'
    elif isinstance(spec, Quantize):
        advice = 'use levels="odd" with rounding="nearest", smaller groups, or more bits; or leave feedback out'
    raise SpecError(f"{spec} is not a contraction, and error feedback may diverge with it: {advice}")
