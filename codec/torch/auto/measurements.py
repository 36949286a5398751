"""Measurements of gradients on which all ranks agree: costs of specs, and the lossiest spec that each tensor allows."""

from collections.abc import Mapping
from typing import Any

import torch

from codec import CallOptions
from codec.advisor.cost_model import Cost
from codec.torch.auto import costs
from codec.torch.auto.quality import Quality

# Norm of residual / norm of gradient above which a tensor gets a less lossy spec; stable runs stay below 15.
_MOST_RATIO = 10.0


class Measurements:
    """Measures the specs of a quality on samples of a hook's gradients.

    Parameters
    ----------
    quality : Quality
        Specs that are measured, and limit of the relative error.
    options : CallOptions
        Number of threads.

    Attributes
    ----------
    sizes : dict of str to int
        Number of values of each tensor whose spec is chosen.
    nbytes : int
        Uncompressed bytes of these tensors.
    numbers : list of int
        Measurements on which all ranks agree, see :func:`codec.torch.auto.costs.numbers_of`; [] before the first ones.
    costs : list of Cost
        For each spec: cost of a step that sends each tensor with this spec, or a less lossy one if the error of this
        one is too large.
    """

    def __init__(self, quality: Quality, options: CallOptions) -> None:
        self._quality, self._options = quality, options
        self.sizes: dict[str, int] = {}
        self.nbytes = self._values = 0
        self.numbers: list[int] = []
        self.costs: list[Cost] = []
        self._errors: dict[str, list[int]] = {}
        self._samples = costs.Samples()  # of the current step

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle and copy, without the samples."""
        return self.__dict__ | {"_samples": costs.Samples()}

    def serve(self, sizes: Mapping[str, int], nbytes: int) -> None:
        """Set the tensors whose specs are chosen; see :class:`Measurements` for the arguments."""
        self.sizes, self.nbytes, self._values = dict(sizes), nbytes, sum(sizes.values())
        self.adopt(self.numbers)

    def begin(self) -> None:
        """Drop the samples of the previous step."""
        self._samples = costs.Samples()

    def sample(self, name: str, gradient: torch.Tensor, shape: tuple[int, ...], ratio: float) -> None:
        """Store a sample of a tensor's flat gradient; `ratio` is the norm of its residual divided by its own."""
        if name in self.sizes and gradient.numel():
            self._samples.values[name] = costs.take(gradient, shape, self._values, len(self.sizes))
            self._samples.on_device |= gradient.device.type != "cpu"
            self._samples.ratios[name] = ratio

    def report(self, size: int, level: int) -> list[int]:
        """Return this rank's measurements of the samples, given the number of ranks and the index of the current spec.

        For tensors that have large residuals, the errors of the current and all lossier specs are replaced by one above
        any limit. These tensors are then sent with a less lossy spec, and their residuals do not grow.
        """
        specs, names = self._quality.specs, list(self.sizes)
        numbers = costs.numbers_of(self._samples, names, self._values, specs, size, self._options)
        lossy = len(specs) - 1
        begin = len(numbers) - lossy * len(names)
        for k, name in enumerate(names):
            if level and self._samples.ratios.get(name, 0.0) > _MOST_RATIO:
                for j in range(level - 1, lossy):
                    numbers[begin + k * lossy + j] = 1 << 30
        return numbers

    def adopt(self, numbers: list[int]) -> None:
        """Replace the measurements by `numbers`, the maxima of all ranks' reports; [] drops them."""
        self.numbers, self.costs, n = numbers, [], len(self._quality.specs)
        self._errors = costs.errors_of(numbers, list(self.sizes), n) if numbers else {}
        full = costs.costs_of(numbers, n) if numbers else []
        for most in range(len(full)):
            counts = [0] * n
            for name, values in self.sizes.items():
                counts[self.allowed(name, most)] += values
            shares = (count / max(1, self._values) for count in counts)
            self.costs.append(sum((cost * share for cost, share in zip(full, shares, strict=True)), Cost(0.0, 0.0)))

    def allowed(self, name: str, most: int) -> int:
        """Return the index of the lossiest spec, up to index `most`, whose error on a tensor is within the limit."""
        errors, limit = self._errors.get(name, []), self._quality.limit * costs.MILLION
        fitting = (i for i in range(min(most, len(errors)), 0, -1) if costs.UNKNOWN < errors[i - 1] <= limit)
        return next(fitting, 0)
