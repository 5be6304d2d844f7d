"""What the first update of a step divides by, in both pipelines: the policy that sampled, or that before the step."""

import math

import pytest
from tiny_models import make_model_folder
from training_setup import PROBES, make_batch, make_config

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError
from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline
from roll.pipeline.on_policy import OffPolicyError
from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline
from roll.utils.metrics.metrics_manager import MetricsManager
from roll.utils.metrics.reduction import reduce_metrics

PIPELINES = {"agentic": AgenticPipeline, "rlvr": RLVRPipeline}
GAP = -0.7  # log p now - log p of the sampler, of every token
WEIGHTS = {"train_infer_correction": {"is_weight": {"enabled": True, "upper_bound": None}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen2", tied=True)


def first_update(name, folder, gap=GAP, **options):
    """(batch that was trained on, metrics of the first update) of samples from a policy with another probability."""
    options = {
        "enable_old_logprobs_recompute": False,
        "use_kl_loss": False,
        "init_kl_coef": 0,
        **options,
    }
    config = make_config(name, folder, micro_batch=8, training_args={"max_steps": 1}, **options)
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
        log_probs = pipeline.score_rows(actor, "compute_log_probs", batch)["log_probs"]
        mask = batch["response_mask"][:, 1:] != 0
        batch["infer_logprobs"] = log_probs.masked_fill(~mask, 0.0) - gap * mask
        batch = pipeline.add_old_log_probs(batch)
        return batch, reduce_metrics(pipeline.train_policy(batch))


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
        make_config("agentic", folder, first_ratio_tolerance=-1)
