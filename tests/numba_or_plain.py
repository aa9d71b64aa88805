"""A fixture for code that numba compiles where it is installed: both versions of it are tested."""

from __future__ import annotations

import pytest

from speedtransfer import jit


@pytest.fixture(params=[pytest.param(True, id="numba"), pytest.param(False, id="plain")])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tell whether the test runs compiled code."""
    if request.param and not jit.available():
        pytest.skip("numba is not installed")
    monkeypatch.setattr("speedtransfer.jit.available", lambda: request.param)
    return bool(request.param)
