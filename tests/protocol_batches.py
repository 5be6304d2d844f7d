"""A batch whose rows are easy to tell apart."""

import torch

from roll.distributed.scheduler.protocol import DataProto


def make(num_rows: int = 4) -> DataProto:
    """Row i is ids [2i, 2i+1], score i/2, tag "a", "b", "a", ..., history [0] * i."""
    return DataProto.from_dict(
        {
            "ids": torch.arange(2 * num_rows).view(num_rows, 2),
            "score": torch.arange(num_rows, dtype=torch.bfloat16) / 2,
        },
        {
            "tag": ["ab"[i % 2] for i in range(num_rows)],
            "history": [[0] * i for i in range(num_rows)],
        },
        {"global_step": 3, "metrics": {"loss": 1.0}},
    )


def ids(data: DataProto) -> list[int]:
    """Which rows of make() these are."""
    return [row[0] // 2 for row in data.batch["ids"].tolist()]
