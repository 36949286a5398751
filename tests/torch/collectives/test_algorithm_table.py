"""The table of all-reduce algorithms: names that users pass, and names in signatures that ranks compare."""

from typing import get_args

from codec import _options
from codec.advisor import cost_model
from codec.torch.reduction import table


def test_options_list_the_algorithms_of_the_table():
    assert list(_options.ALGORITHMS) == ["auto", *table.ALL_REDUCES]


def test_cost_model_uses_names_of_the_table():
    assert set(get_args(cost_model.Algorithm)) <= table.ALL_REDUCES.keys()


def test_variants_on_gpus_differ_in_name_only_by_a_suffix():
    """Names of GPU variants differ only by a suffix; ranks hash the names (docs/spec/protocol.md, section 5.1)."""
    everything = [*table.ALL_REDUCES.values(), table.REDUCE_SCATTER, table.GATHER, table.ALL_TO_ALL]
    names = {each.name: each.on_device and each.on_device.name for each in everything}
    assert names == {
        "two_shot": "two_shot on GPUs",
        "all_gather": "all_gather on GPUs",
        "ring": None,
        "raw": None,
        "shared_scale": None,
        "reduce_scatter": "reduce_scatter on GPUs",
        "gather": "gather on GPUs",
        "all_to_all": "all_to_all on GPUs",
    }
