"""Values of a model that were replaced by another rank's when a LocalSteps was created.

A program may load a checkpoint into the model before it creates the LocalSteps. Between synchronizations the parameters
of ranks differ, so that the checkpoint of each rank but one is overwritten. :meth:`LocalSteps.load_state_dict` restores
the values that its state belongs to.
"""

from collections.abc import Mapping, Sequence

import torch

from codec.torch.replicas import agreement
from codec.torch.replicas.model import Parameters


def digest_of(parameters: Parameters) -> str:
    """Return the digest of parameters by which a state recognizes the model that it belongs to."""
    return agreement.digest_of(parameters.values())


class Replaced:
    """Copies of a model's values, in host memory, from before they were replaced.

    Parameters
    ----------
    parameters : dict of str to Parameter
        Synchronized parameters by name.
    tensors : sequence of tensor
        All tensors that will be overwritten.
    """

    def __init__(self, parameters: Parameters, tensors: Sequence[torch.Tensor]) -> None:
        self.digest = digest_of(parameters)
        self._copies = [(x, x.detach().to("cpu", copy=True)) for x in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the tensors to their former values."""
        for x, values in self._copies:
            x.copy_(values)


def changed_names(tensors: Mapping[str, torch.Tensor], values: Sequence[torch.Tensor]) -> list[str]:
    """Return the names of those tensors whose bits differ from `values`, which are in the same order."""
    pairs = zip(tensors.items(), values, strict=True)
    return [name for (name, x), theirs in pairs if agreement.digest_of([x]) != agreement.digest_of([theirs])]
