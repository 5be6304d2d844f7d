"""Makes the helper modules that lie directly in tests/ importable from every test file."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# Where numbers of models and samples are compared: `make test-portable` runs these under several
# arithmetics.
PORTABLE = (
    "algorithms",
    "distributed/strategy",
    "engines",
    "models",
    "ops",
    "pipeline/agentic/test_agentic_pipeline.py",
    "pipeline/dpo",
    "pipeline/rlvr/test_golden.py",
    "pipeline/test_actor_losses.py",
    "pipeline/rlvr/test_rlvr_pipeline.py",
    "pipeline/sft",
    "models/test_checkpoint.py",
    "pipeline/test_infer_worker.py",
    "pipeline/test_model_workers.py",
    "pipeline/test_policy_pipeline.py",
    "test_vectors.py",
    "utils/test_functionals.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    paths = [HERE / name for name in PORTABLE]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise pytest.UsageError(
            f"tests/conftest.py: PORTABLE names what is not there: {', '.join(missing)}"
        )
    for item in items:
        if any(item.path.is_relative_to(path) for path in paths):
            item.add_marker(pytest.mark.portable)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """A test that limits the threads of torch, as `roll demo` does on a busy machine, limits no
    other test: sums over another number of threads differ in their last bits."""
    torch = sys.modules.get("torch")  # most test files import it, and those that do not stay fast
    before = None if torch is None else torch.get_num_threads()
    yield
    if torch is not None and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def lone_process_group() -> Iterator[None]:
    """For tests that make this process a torch.distributed group of one: afterwards there is none,
    as before."""
    yield
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For numbers that are compared to the last bit: sums over several threads may be added in
    another order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Fails a test that leaves a thread or a process behind."""
    from process_checks import children

    threads, processes = set(threading.enumerate()), {child.pid for child in children()}
    yield
    left = set(threading.enumerate()) - threads
    assert [
        thread for thread in left if type(thread).__name__ != "TMonitor"
    ] == []  # tqdm keeps that one
    assert [child for child in children() if child.pid not in processes] == []
