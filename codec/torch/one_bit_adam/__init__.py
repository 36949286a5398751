"""1-bit Adam and 0/1 Adam: optimizers that average quantized momenta instead of gradients after a warm-up."""

from codec.torch.one_bit_adam.optimizer import OneBitAdam
from codec.torch.one_bit_adam.schedule import VarianceSchedule

__all__ = ["OneBitAdam", "VarianceSchedule"]
