"""Makes the helper modules that lie directly in tests/ importable from every test file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def lone_process_group() -> Iterator[None]:
    """For tests that make this process a torch.distributed group of one: afterwards there is none, as before."""
    yield
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
