"""Storage that fails at a system call: full disks, errors, interrupted and short writes, and kills.

Receivers keep the weights and the program at one version, and publishers go on, in the same process and in the next.
"""

import pytest

from support.storage_faults import FAULTS, OPERATIONS, run_faults
from support.tiers import NIGHTLY

# Distance between the system calls at which faults are tried. Primes, so that the points cover all phases of a loop.
STEPS = {"first snapshot": 23, "update": 59, "snapshot": 23, "open": 23, "recovery": 59}
STEPS |= {"shared first snapshot": 419, "shared update": 211, "shared snapshot": 419}
PUBLICATION = 167


@pytest.mark.parametrize("faults", [[fault] for fault in FAULTS] if NIGHTLY else [list(FAULTS)], ids=", ".join)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_storage_that_fails_at_any_system_call_loses_nothing(operation, faults, tmp_path):
    run_faults(tmp_path, operation, faults, 1 if NIGHTLY else STEPS.get(operation, PUBLICATION))
