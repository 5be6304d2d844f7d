"""Critic, reward and generating workers on tiny models."""

import pytest
import torch
from tiny_models import make_model_folder
from training_setup import make_batch, make_config
from transformers import AutoModelForCausalLM

from roll.configs.worker_config import WorkerConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.pipeline.base_worker import CriticWorker, InferWorker, RewardWorker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_cluster(name, worker_cls, role, folder, **options):
    config = make_config("agentic", folder, **options)
    cluster = Cluster(name, worker_cls, ResourceManager(0, 1), role)
    cluster.initialize(config)
    return cluster


def role_of(folder, name, strategy, **options):
    return WorkerConfig(
        name=name,
        strategy_args={"strategy_name": strategy},
        model_args={
            "model_name_or_path": str(folder),
            "dtype": "fp32",
            "disable_gradient_checkpointing": True,
        },
        training_args={
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "max_steps": 60,
            **options,
        },
        infer_batch_size=3,
    )


def test_a_critic_learns_the_returns(folder):
    role = role_of(folder, "critic", "hf_train", learning_rate=1e-2)
    cluster = make_cluster("critic", CriticWorker, role, folder)
    batch = make_batch("agentic")
    mask = batch.batch["response_mask"][:, 1:] != 0
    values = cluster.compute_values(batch).batch["values"]
    assert values.shape == mask.shape
    assert (values[~mask] == 0).all() and (values[mask] != 0).any()
    batch.batch["returns"] = torch.where(mask, 1.5, float("nan"))
    batch.batch["values"] = values
    losses = []
    for step in range(30):
        batch.meta_info = {**batch.meta_info, "global_step": step}
        losses.append(cluster.train_step(batch).meta_info["metrics"]["critic/loss@sum"])
    assert losses[-1] < 0.05 * losses[0]
    learned = cluster.compute_values(batch).batch["values"][mask]
    assert (learned - 1.5).abs().mean() < 0.3


def test_a_reward_model_scores_rows_whatever_their_padding(folder):
    role = role_of(folder, "reward", "hf_infer")
    role = role.model_copy(
        update={"model_args": role.model_args.model_copy(update={"random_init": True})}
    )
    cluster = make_cluster("reward", RewardWorker, role, folder)
    batch = make_batch("agentic")
    rewards = cluster.compute_rewards(batch).batch["response_level_rewards"]
    assert rewards.shape == (len(batch),)
    alone = torch.cat(
        [
            cluster.compute_rewards(batch[i]).batch["response_level_rewards"]
            for i in range(len(batch))
        ]
    )
    torch.testing.assert_close(rewards, alone, rtol=1e-4, atol=1e-5)
    assert rewards.unique().numel() == len(batch)


def test_greedy_answers_are_those_of_plain_transformers(folder):
    cluster = make_cluster(
        "actor_infer", InferWorker, role_of(folder, "actor_infer", "hf_infer"), folder
    )
    ids = torch.tensor([[0, 0, 30, 31], [40, 41, 42, 43]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    prompts = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask},
        meta_info={"generation_config": {"do_sample": False, "max_new_tokens": 5}},
    )
    rows = cluster.generate(prompts)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = plain.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=5, pad_token_id=0
    )[:, 4:]
    for row, answer in zip(rows, expected, strict=True):
        sampled = row.batch["input_ids"][row.batch["response_mask"] != 0]
        assert sampled.tolist() == answer.tolist()[: len(sampled)]
    assert "time/actor_infer/generate/total" in rows.meta_info["metrics"]
