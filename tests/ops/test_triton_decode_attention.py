"""The attention of a decoding step in Triton's interpreter (`test_in_interpreter` sets it up)."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs inside test_in_interpreter", allow_module_level=True)

import decode_checks

from roll.ops import triton_decode_attention

SHAPES = [
    (1, 1, 1, 1, 4),
    (3, 4, 2, 9, 8),
    (2, 7, 1, 70, 5),
    (2, 20, 1, 65, 48),
    (4, 6, 6, 130, 16),
]


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_checks, "decode_attention", triton_decode_attention.decode_attention)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16], ids=str
)  # the interpreter has no bfloat16 products
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_one_token(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for seed in range(3):
        decode_checks.check_decode_attention(*shape, dtype=dtype, device="cpu", seed=seed)
