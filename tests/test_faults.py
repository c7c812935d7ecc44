"""The faults of faults/fault_table.py can still be put into the sources: each text occurs exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.fault_table import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_is_there_once(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
