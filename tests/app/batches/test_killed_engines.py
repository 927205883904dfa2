"""A batch over real engines, of which everything is killed twice in the middle, engines included.

`--real-lines 500` asks for more than `make test` does by default.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.batches.ingress_process import CONCURRENCY, REAL
from tests.app.batches.killing import check

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_line_is_there_once_and_none_is_computed_twice_but_those_in_flight(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    lines = int(pytestconfig.getoption("real_lines"))
    check(tmp_path, lines, (lines // 6, lines // 2), CONCURRENCY, REAL, tokens=8, bad=25)
