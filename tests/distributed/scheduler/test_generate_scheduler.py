"""Requests with several answers, and answers one by one, as ROLL's module has them."""

import pytest
import torch

from roll.distributed.scheduler.protocol import (
    DataProto,
    ExperienceItem,
    expand_requests,
    expand_responses,
)


def rows(*numbers: int, **meta) -> DataProto:
    return DataProto.from_dict({"row": torch.tensor(numbers)}, meta_info=meta)


@pytest.mark.parametrize(("expand", "num_requests", "each"), [(True, 3, 1), (False, 1, 3)])
def test_requests(expand, num_requests, each):
    data = rows(7, generation_config={"num_return_sequences": 9})
    requests = expand_requests(data, 3, expand)
    assert len(requests) == num_requests
    assert all(
        request.meta_info["generation_config"] == {"num_return_sequences": each}
        for request in requests
    )
    requests[0].meta_info["generation_config"]["top_p"] = 0.5  # a copy of its own
    assert data.meta_info["generation_config"] == {"num_return_sequences": each}
    with pytest.raises(KeyError, match="generation_config"):
        expand_requests(rows(1), 2, True)


def test_responses():
    assert expand_responses(None) == []
    found = expand_responses([[rows(1, 2), rows(3)], rows(4, 5)])
    assert [item["row"].tolist() for item in found] == [[1], [2], [3], [4], [5]]
    assert ExperienceItem(3).domain == "default" and ExperienceItem(3).data is None
