"""The toys of each test."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # engine_toys, which the tests share


@pytest.fixture
def toys(tmp_path):
    from engine_toys import Toys

    made = Toys(tmp_path)
    yield made
    for controls in made.family.controls.values():
        controls.gate.set()
        controls.prepare_gate.set()
    assert len({record.request_id for record in made.records}) == len(made.records), (
        "a request has two records"
    )
