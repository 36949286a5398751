"""Groups are known to use NCCL by the names of their backends, of which torch 2.15 has several."""

from types import SimpleNamespace

import pytest
import torch

from codec.torch.transport import nccl


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nccl", True),
        ("nccl2", True),
        ("nccl-lazy", True),
        ("nccl2-lazy", True),
        ("gloo", False),
        ("gloo-lazy", False),
        ("ucc", False),
    ],
)
def test_groups_use_nccl_by_the_name_of_their_backend(name, expected):
    cuda = torch.device("cuda")
    group = SimpleNamespace(_device_types=[cuda], _get_backend=lambda _: SimpleNamespace(name=lambda: name))
    assert nccl.uses_nccl(group) is expected
    group._device_types = [torch.device("cpu")]
    assert nccl.uses_nccl(group) is False
