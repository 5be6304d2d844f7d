"""What RLVR and agentic pipelines share, with clusters that only note what they are given."""

from types import SimpleNamespace

import torch

from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.policy_pipeline import PolicyPipeline
from roll.utils.metrics.metrics_manager import MetricsManager


class NotingCluster:
    """Two ranks. Scores a row by the sum of its ids, and notes the rows that it trains on."""

    dp_size = 2

    def __init__(self, name, story):
        self.name, self.story = name, story

    def execute_all_sync(self, method, data):
        self.story.append(
            (self.name, method, len(data), data.meta_info.get("disable_adapter", False))
        )
        sums_BT = data["input_ids"].sum(1, keepdim=True).float()
        found = {"log_probs": sums_BT, "values": sums_BT}
        return DataProto.from_dict(found, meta_info={"metrics": {f"{self.name}/calls@sum": 1.0}})

    def train_step(self, data):
        self.story.append((self.name, "train_step", data["mask"].sum(1).tolist()))
        gap = {"actor/first_gap@sum": [0.1, 0.3], "actor/first_gap_max@max": [1.0, 3.0]}
        return DataProto(meta_info={"metrics": gap})

    def load_states(self):
        self.story.append((self.name, "load"))

    def offload_states(self):
        self.story.append((self.name, "offload"))


def make_pipeline(*, reference=True, critic=True, **config):
    pipeline = object.__new__(PolicyPipeline)
    story = []
    pipeline.actor_train = NotingCluster("actor", story)
    pipeline.reference = NotingCluster("reference", story) if reference else None
    pipeline.critic = NotingCluster("critic", story) if critic else None
    pipeline.clusters = [
        cluster
        for cluster in (pipeline.actor_train, pipeline.reference, pipeline.critic)
        if cluster is not None
    ]
    pipeline.metrics = MetricsManager()
    pipeline.pipeline_config = SimpleNamespace(
        **{"is_offload_states": False, "enable_reference": True, "ratio_tolerance": None, **config}
    )
    return pipeline, story


def make_rows(num_rows):
    ids = torch.arange(1, 2 * num_rows + 1).view(num_rows, 2)
    columns = {
        name: torch.ones_like(ids)
        for name in ("attention_mask", "position_ids", "response_mask", "mask")
    }
    return DataProto.from_dict(
        {"input_ids": ids, **columns}, meta_info={"loss_mask_keys": ["mask"], "global_step": 7}
    )


def test_one_row_is_scored_by_two_ranks_and_comes_back_once():
    pipeline, story = make_pipeline()
    batch = pipeline.add_values(pipeline.add_reference(make_rows(1)))
    assert story == [
        ("reference", "compute_log_probs", 2, False),
        ("critic", "compute_values", 2, False),
    ]
    assert batch["ref_log_probs"].tolist() == [[3.0]] and batch["values"].tolist() == [[3.0]]
    assert {"reference/calls@sum", "critic/calls@sum"} <= pipeline.metrics.metrics.keys()


def test_three_rows_need_no_copies():
    pipeline, story = make_pipeline()
    assert pipeline.add_values(make_rows(3))["values"].tolist() == [[3.0], [7.0], [11.0]]
    assert story == [("critic", "compute_values", 3, False)]


def test_a_policy_with_an_adapter_is_its_own_reference():
    pipeline, story = make_pipeline(reference=False, critic=False)
    batch = pipeline.add_values(pipeline.add_reference(make_rows(2)))
    assert story == [("actor", "compute_log_probs", 2, True)] and "values" not in batch
    assert batch["ref_log_probs"].tolist() == [[3.0], [7.0]]


def test_without_a_reference_nothing_is_added():
    pipeline, story = make_pipeline(enable_reference=False)
    assert "ref_log_probs" not in pipeline.add_reference(make_rows(2)) and story == []


def test_a_rank_without_a_row_trains_on_one_that_is_masked():
    pipeline, story = make_pipeline()
    rows = make_rows(1)
    pipeline.train_policy(rows)
    [(name, _, masks)] = story
    assert name == "actor" and sorted(masks) == [0, 2] and len(rows) == 1
    assert pipeline.metrics.metrics["rollout/logprob_gap/mean"] == 0.4
    assert pipeline.metrics.metrics["rollout/logprob_gap/max"] == 3.0


def test_only_the_roles_in_use_are_on_the_device():
    pipeline, story = make_pipeline(is_offload_states=True)
    pipeline.use(pipeline.critic)
    assert story == [("actor", "offload"), ("reference", "offload"), ("critic", "load")]
