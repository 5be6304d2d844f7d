"""The step that RLVR and agentic pipelines share, with clusters that only note what they are given;
how far the first update is from sampling, and when a run stops for it."""

import math
from types import SimpleNamespace

import pytest
import torch
from rlvr_setup import make_config, make_values
from tiny_models import make_model_folder
from training_setup import PROBES, make_batch
from training_setup import make_config as training_config

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError
from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline
from roll.pipeline.base_worker import first_update_metrics
from roll.pipeline.loss_io import first_update_report, sampling_metrics
from roll.pipeline.policy_pipeline import OffPolicyError, PolicyPipeline, check_first_update
from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline
from roll.utils.metrics.metrics_manager import MetricsManager
from roll.utils.metrics.reduction import reduce_metrics


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
    pipeline.train_on(pipeline.actor_train, rows)
    [(name, _, masks)] = story
    assert name == "actor" and sorted(masks) == [0, 2] and len(rows) == 1
    assert pipeline.metrics.metrics["rollout/logprob_gap/mean"] == 0.4
    assert pipeline.metrics.metrics["rollout/logprob_gap/max"] == 3.0


def test_only_the_roles_in_use_are_on_the_device():
    pipeline, story = make_pipeline(is_offload_states=True)
    pipeline.use(pipeline.critic)
    assert story == [("actor", "offload"), ("reference", "offload"), ("critic", "load")]


# -- the first update against sampling -------------------------------------------------------------


def test_gap_and_ratio_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0, float("nan")]], requires_grad=True)
    sampled = torch.tensor([[-1.0, -2.5, 0.0]])
    metrics = sampling_metrics(log_probs, sampled, torch.tensor([[True, True, False]]), 4.0)
    assert float(metrics["actor/sampling_gap@sum"]) == pytest.approx(0.125), (
        "over the tokens of the whole step"
    )
    assert float(metrics["actor/sampling_gap_max@max"]) == 0.5
    assert float(metrics["actor/sampling_ratio_error_max@max"]) == pytest.approx(
        0.6487, abs=1e-4
    )  # e^0.5 - 1
    assert not any(value.requires_grad for value in metrics.values())


def test_the_first_update_has_its_own_names():
    found = first_update_metrics(
        {"actor/sampling_gap@sum": [0.1, 0.2], "actor/sampling_gap_max@max": [1, 3], "x": 1}
    )
    assert found == {"actor/first_gap@sum": pytest.approx(0.3), "actor/first_gap_max@max": [1, 3]}
    report = first_update_report({**found, "actor/first_gap@sum": [0.1, 0.3]})  # of two ranks
    assert report == {"rollout/logprob_gap/mean": pytest.approx(0.4), "rollout/logprob_gap/max": 3}
    assert first_update_report({"actor/lr": 1}) == {}


def check(error, tmp_path, **overrides):
    check_first_update(
        {"actor/first_ratio_error@sum": [error / 2, error / 2]}, make_config(tmp_path, **overrides)
    )


def test_the_tolerance_follows_the_precision(tmp_path):
    check(0.9e-3, tmp_path)
    with pytest.raises(OffPolicyError, match=r"mean of \|ratio - 1\| is 0.0011, more than 0.001"):
        check(1.1e-3, tmp_path)
    values = make_values(tmp_path)
    half = {"actor_infer": {**values["actor_infer"], "model_args": {"dtype": "bf16"}}}
    check(0.04, tmp_path, **half)
    with pytest.raises(
        OffPolicyError, match="precision bf16 and fp32: engine and trainer round differently"
    ):
        check(0.06, tmp_path, **half)
    check(0.5, tmp_path, first_ratio_tolerance=0)
    check(0.5, tmp_path, first_ratio_tolerance=0.6)
    check(0.5, tmp_path, async_generation_ratio=1)
    check(0.5, tmp_path, train_infer_correction={"filters": [{"enabled": True}]})


@pytest.mark.parametrize(
    ("sampling", "cause"),
    [
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 5}, "top_k=5"),
        (
            {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.2},
            "repetition_penalty=1.2",
        ),
        (
            {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
            "tokens are not sampled but the most likely ones",
        ),
    ],
)
def test_likely_causes_are_named(tmp_path, sampling, cause):
    values = make_values(tmp_path)
    with pytest.raises(OffPolicyError, match=cause):
        check(0.5, tmp_path, actor_infer={**values["actor_infer"], "generating_args": sampling})


PIPELINES = {"agentic": AgenticPipeline, "rlvr": RLVRPipeline}
GAP = -0.7  # log p now - log p of the sampler, of every token
WEIGHTS = {"train_infer_correction": {"is_weight": {"enabled": True, "upper_bound": None}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen2", tied=True)


def first_update(name, folder, gap=GAP, **options):
    """(batch that was trained on, metrics of the first update) of samples from a policy with
    another probability."""
    options = {
        "enable_old_logprobs_recompute": False,
        "use_kl_loss": False,
        "init_kl_coef": 0,
        **options,
    }
    config = training_config(name, folder, micro_batch=8, training_args={"max_steps": 1}, **options)
    with Cluster(
        "actor_train", PROBES[name], ResourceManager(backend="local"), config.actor_train
    ) as actor:
        actor.initialize(config)
        pipeline = object.__new__(PIPELINES[name])
        pipeline.pipeline_config, pipeline.actor_train, pipeline.metrics = (
            config,
            actor,
            MetricsManager(),
        )
        batch = make_batch(name)
        batch.meta_info["global_step"] = 0
        del batch.batch["old_log_probs"]
        batch["position_ids"] = batch["attention_mask"].cumsum(1) - 1
        log_probs = pipeline.compute_rows(actor, "compute_log_probs", batch)["log_probs"]
        mask = batch["response_mask"][:, 1:] != 0
        batch["infer_logprobs"] = log_probs.masked_fill(~mask, 0.0) - gap * mask
        batch = pipeline.add_old_log_probs(batch)
        return batch, reduce_metrics(pipeline.train_on(pipeline.actor_train, batch))


@pytest.mark.parametrize("name", PIPELINES)
def test_stale_samples_have_the_ratio_to_the_policy_that_sampled(folder, name):
    batch, metrics = first_update(name, folder, async_generation_ratio=1)
    assert batch["old_log_probs"].equal(batch["infer_logprobs"]) and "entropy" not in batch
    assert metrics["actor/ratio_mean@sum"] == pytest.approx(math.exp(GAP), rel=1e-3)  # 0.497


@pytest.mark.parametrize("name", PIPELINES)
def test_also_if_nothing_may_be_computed(folder, name):
    options = {"async_generation_ratio": 1, "force_disable_old_logprobs_recompute": True}
    _, metrics = first_update(name, folder, **options)
    assert metrics["actor/ratio_mean@sum"] == pytest.approx(math.exp(GAP), rel=1e-3)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_correction_weighs_stale_samples_instead(folder, name):
    batch, metrics = first_update(name, folder, async_generation_ratio=1, **WEIGHTS)
    assert metrics["actor/ratio_mean@sum"] == pytest.approx(1.0, rel=1e-3)
    mask = batch["response_mask"][:, 1:] != 0
    weights = batch["train_infer_is_weight"][mask]
    assert weights.min() > 0.49 and weights.max() < 0.51, "the ratio is in the weights"


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("recompute", [False, True])
def test_samples_of_this_step_have_ratio_1(folder, name, recompute):
    _, metrics = first_update(name, folder, gap=0.0, enable_old_logprobs_recompute=recompute)
    assert metrics["actor/ratio_mean@sum"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_synchronous_run_that_is_not_on_policy_stops(folder, name):
    with pytest.raises(OffPolicyError, match=r"mean of \|ratio - 1\| is 0\.5, more than 0\.05 "):
        first_update(name, folder)
    first_update(name, folder, first_ratio_tolerance=0)
    first_update(name, folder, **WEIGHTS)


def test_a_tolerance_below_zero_is_refused(folder):
    with pytest.raises(ConfigError, match="first_ratio_tolerance"):
        training_config("agentic", folder, first_ratio_tolerance=-1)
