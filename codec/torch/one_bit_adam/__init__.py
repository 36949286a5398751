"""1-bit Adam and 0/1 Adam: optimizers whose all-reduce sends signs of momenta after a warm-up."""

from codec.torch.one_bit_adam.optimizer import OneBitAdam
from codec.torch.one_bit_adam.schedule import ZeroOneSchedule

__all__ = ["OneBitAdam", "ZeroOneSchedule"]
