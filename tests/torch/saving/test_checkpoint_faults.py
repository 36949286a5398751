"""Storage that fails at a system call of a save: the last complete checkpoint is loaded to the bit."""

import pytest

from support.storage_faults import FAULTS, run_faults
from support.tiers import NIGHTLY

STEP = 127  # distance between the system calls at which faults are tried


@pytest.mark.parametrize("faults", [[fault] for fault in FAULTS] if NIGHTLY else [list(FAULTS)], ids=", ".join)
@pytest.mark.parametrize("operation", ["save", "save and delete"])
def test_storage_that_fails_at_any_system_call_loses_no_complete_checkpoint(operation, faults, tmp_path):
    run_faults(tmp_path, operation, faults, 1 if NIGHTLY else STEP, module="checkpoint_faults")
