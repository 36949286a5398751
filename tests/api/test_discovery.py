"""Public names are found by completion, and codec.torch is imported on first use."""

import codec
import codec.torch
from support.processes import run


def test_dir_lists_public_names_only():
    for module, more in ((codec, {"kv", "optimizers", "torch", "weight_sync"}), (codec.torch, {"ops", "pipelining"})):
        names = {name for name in dir(module) if not name.startswith("__")}
        assert names == {*module.__all__} | more
        assert all(getattr(module, name) is not None for name in names)


def test_torch_is_imported_on_first_use():
    run(
        """
assert "torch" not in sys.modules
assert callable(codec.torch.all_reduce) and "torch" in sys.modules
assert "codec.torch.pipelining" not in sys.modules and callable(codec.torch.pipelining.CompressedStage)
try:
    codec.no_such_name
except AttributeError as e:
    assert str(e) == "module 'codec' has no attribute 'no_such_name'"
    print("the end")
"""
    )


def test_missing_torch_is_named_with_the_way_to_get_it():
    run(
        """
sys.modules["torch"] = None
try:
    codec.torch
except AttributeError as e:
    assert str(e) == "codec.torch needs PyTorch, which is not installed: pip install torch", e
assert not hasattr(codec, "torch")
print("the end")
"""
    )
