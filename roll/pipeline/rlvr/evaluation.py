"""`roll eval`: the validation of a config, on its own, with the weights of any checkpoint."""

from __future__ import annotations

from pathlib import Path

from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError
from roll.models.checkpoint import seed_everything
from roll.models.model_providers import default_tokenizer_provider
from roll.pipeline.data import load_data
from roll.pipeline.rlvr.rewards.check import check_rewards
from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.pipeline.rlvr.rollout import Tally
from roll.pipeline.rlvr.samples import scored_batch
from roll.pipeline.rlvr.scoring import Scorer, close_rewards
from roll.pipeline.rlvr.validation import ValSampling, val_metrics, validate
from roll.utils.rollout_log import RolloutLog


def evaluate(
    config: RLVRConfig,
    checkpoint: str | Path | None = None,
    *,
    samples_to: str | Path | None = None,
) -> dict[str, float]:
    """The metrics of one validation (see `val_metrics`), without training anything.

    Args:
        checkpoint: a run (its newest checkpoint), a checkpoint of a run, or any model folder or Hugging Face name; by
            default the model that the config starts from.
        samples_to: a folder whose `rollouts/val-000000.jsonl` gets every sample.
    """
    if config.validation is None or not (
        config.validation.data_args and config.validation.data_args.files
    ):
        raise ConfigError(
            "validation: missing; it says which prompts to evaluate on, and how to sample"
        )
    model_args = config.actor_infer.model_args
    if checkpoint is not None:
        model_args = model_args.model_copy(update={"model_name_or_path": str(checkpoint)})
    actor_infer = config.actor_infer.model_copy(update={"model_args": model_args})
    config = config.model_copy(update={"actor_infer": actor_infer})
    tokenizer = default_tokenizer_provider(model_args)
    check_rewards(config)
    prompts = load_data(config, "validation", tokenizer)
    assert prompts is not None
    seed_everything(config.seed)
    manager = ResourceManager(
        config.num_gpus_per_node, config.num_nodes, backend=config.execution_backend
    )
    clusters: list[Cluster] = []
    try:
        for name, role in config.active_roles().items():
            if name == "actor_infer" or name.startswith("reward-"):
                clusters.append(Cluster(name, role.worker_cls, manager, role))
        for cluster in clusters:
            cluster.initialize(config)
        engine = next(cluster for cluster in clusters if cluster.cluster_name == "actor_infer")
        rewards = {
            cluster.cluster_name.removeprefix("reward-"): cluster
            for cluster in clusters
            if cluster is not engine
        }
        tally = Tally(tokenizer)
        sampling, score = ValSampling.of(config), Scorer(rewards, tokenizer)
        groups = validate(prompts, sampling, engine.answer_requests, score, tally)
    finally:
        for cluster in clusters:
            close_rewards(cluster)
            cluster.shutdown()
    if samples_to is not None:
        batch = scored_batch(groups, tokenizer.pad_token_id) if groups else None
        RolloutLog(samples_to, tokenizer, None).write(0, batch, split="val", dropped=tally.dropped)
    return val_metrics(groups, tally)
