"""Storage that fails at a system call: full disks, errors, interrupted and short writes, and kills.

Receivers keep the weights and the program at one version, and publishers go on, in the same process and in the next.
"""

import pytest

from support.storage_faults import FAULTS, OPERATIONS, run_faults
from support.tiers import NIGHTLY

# Distance between the system calls at which faults are tried. Primes, so that the points cover all phases of a loop.
STEPS = {"first snapshot": 11, "update": 29, "snapshot": 11, "open": 11, "recovery": 29}
STEPS |= {"shared first snapshot": 211, "shared update": 101, "shared snapshot": 211}
PUBLICATION = 83


@pytest.mark.parametrize("faults", [[fault] for fault in FAULTS] if NIGHTLY else [list(FAULTS)], ids=", ".join)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_storage_that_fails_at_any_system_call_loses_nothing(operation, faults, tmp_path):
    run_faults(tmp_path, operation, faults, 1 if NIGHTLY else STEPS.get(operation, PUBLICATION))
