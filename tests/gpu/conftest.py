"""Everything in this folder needs a CUDA device.

Where there is none the tests are not collected, as there are thousands of them, unless they are asked for by their path or
by ``-m gpu``; then they are skipped with the reason. After a fault on the device every call of its process fails, so that
process ends: a worker of pytest-xdist has a successor, which goes on with the other tests.
"""

import os
import re
from pathlib import Path

import pytest
import torch

from speedtransfer.cuda import cuda_status
from speedtransfer.engines import calibration

pytest.register_assert_rewrite("gpu.tools")

HERE = Path(__file__).parent

# Streams that share one of the device's queues wait for each other: enough queues for all that a test has.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def pytest_ignore_collect(collection_path, config):
    if collection_path.name.startswith("test_") and not asked_for(config):
        return True if cuda_status().reason else None
    return None


def asked_for(config):
    """Tell whether the command line names this folder, something in it, or a mark that only its tests have."""
    named = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    by_mark = re.search(r"\b(?<!not )(gpu|sanitizer)\b", config.option.markexpr)
    return by_mark is not None or any(HERE in (path, *path.parents) for path in named)


@pytest.hookimpl(trylast=True)  # once the failure is known to everybody else
def pytest_runtest_logreport(report):
    if not report.failed:
        return
    try:
        assert torch.ones(3, device="cuda").sum().item() == 3
        torch.cuda.synchronize()
    except Exception as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)  # an orderly end would wait for the device
        pytest.exit(f"the device cannot be used after {report.nodeid}: {str(error).strip().splitlines()[0]}", 2)


@pytest.hookimpl(tryfirst=True)  # before `-m gpu` selects
def pytest_collection_modifyitems(items):
    # Of each file once: there are many more items, and `parents` takes its time.
    files = {path for path in {item.path for item in items} if HERE in path.parents}
    ours = [item for item in items if item.path in files]
    if not ours:
        return
    reason = cuda_status().reason
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA: {reason}"))


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Leave the user's calibration alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("SPEEDTRANSFER_ENGINE", raising=False)
        calibration._known.clear()
        yield
        calibration._known.clear()
