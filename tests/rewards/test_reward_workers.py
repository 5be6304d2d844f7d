"""Reward workers through their clusters: columns, order, dropped rows, bad configs, keys."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from process_checks import eventually, marked
from tiny_models import make_model_folder, tiny_model, tiny_tokenizer

from roll.configs.arguments import ModelArguments
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.exceptions import ConfigError
from roll.pipeline.rlvr.rlvr_config import FUNCTION_REWARD_WORKER, RewardConfig, RLVRConfig
from roll.rewards.check import OPTIONAL_KEYS, check_reward, check_rewards
from roll.rewards.workers import PoolRewardWorker

REWARDS = "roll.rewards.workers"
JUDGE = f"{REWARDS}.LLMJudgeRewardWorker"
MATH = f"{REWARDS}.MathRuleRewardWorker"
CHOICE = f"{REWARDS}.MultipleChoiceBoxedRuleRewardWorker"
IFEVAL = f"{REWARDS}.GeneralRuleRewardWorker"
CODE = f"{REWARDS}.CodeSandboxRewardWorker"
CROSSTHINK = f"{REWARDS}.CrossThinkQARuleRewardWorker"
SCORE = """
def score(prompt, response, ground_truth, **row):
    if response == "hang":
        while True: pass
    if response == "oops":
        raise KeyError("oops")
    return {"right": float(response == ground_truth), "tag": 0.5 * (row["tag"] == "a")}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def reward_file(tmp_path):
    (tmp_path / "mine.py").write_text(SCORE)
    return tmp_path / "mine.py"


@pytest.fixture
def make_cluster(folder):
    """Makes clusters of one reward, and closes them."""
    clusters = []

    def make(backend="local", **values) -> Cluster:
        config = RewardConfig(**values)
        manager = ResourceManager(0, 1, backend=backend)
        cluster = Cluster("reward-math", config.worker_cls, manager, config)
        actor = SimpleNamespace(model_args=ModelArguments(model_name_or_path=str(folder)))
        pipeline = {"rpc_timeout": 60, "seed": 0, "resume_from_checkpoint": False}
        cluster.initialize(SimpleNamespace(actor_train=actor, output_dir="unused", **pipeline))
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        with cluster:  # shuts it down
            if hasattr(cluster.worker_cls, "close"):
                cluster.execute_all_sync("close")


def make_batch(pairs: list[tuple[str, str]], **columns) -> DataProto:
    """Right-padded rows of prompt and response, with the end token after the response."""
    tokenizer = tiny_tokenizer()
    rows = [[tokenizer.encode(t, add_special_tokens=False) for t in pair] for pair in pairs]
    width = max(len(p) + len(r) + 1 for p, r in rows)
    ids, attended, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for index, (p, r) in enumerate(rows):
        line = [*p, *r, tokenizer.eos_token_id]
        ids[index, : len(line)] = torch.tensor(line)
        attended[index, : len(line)] = 1
        mask[index, len(p) : len(line)] = 1
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": attended, "response_mask": mask}, columns
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_function_of_ones_own(make_cluster, reward_file, world_size):
    spec = f"{reward_file}:score"
    cluster = make_cluster(reward_fn=spec, reward_timeout=3.0, world_size=world_size)
    pairs = [("1+1=", "2"), ("1+2=", "2"), ("?", "hang"), ("??", "oops"), ("2+2=", "4"), ("", "4")]
    batch = make_batch(pairs, ground_truth=["2", "3", "", "", "4", "4"], tag=list("aabbab"))
    result = cluster.compute_rewards(batch)
    assert marked(str(reward_file))
    expected = torch.tensor([1.5, 0.5, math.nan, math.nan, 1.5, 1.0])
    torch.testing.assert_close(result.batch["scores"], expected, equal_nan=True)
    torch.testing.assert_close(result.batch["response_level_rewards"], expected, equal_nan=True)
    assert result.batch["token_level_rewards"].shape == (6, batch.batch["input_ids"].shape[1] - 1)
    assert not result.batch["token_level_rewards"].any()
    reasons = list(result.non_tensor_batch["drop_reason"])
    assert reasons.pop(3).startswith("exception: KeyError: 'oops' (mine.py:")
    assert reasons == [None, None, "timeout", None, None]
    assert result.non_tensor_batch["reward_parts"][0] == {"right": 1.0, "tag": 0.5}
    cluster.execute_all_sync("close")
    assert eventually(lambda: not marked(str(reward_file)))


@pytest.mark.ray
def test_a_function_of_ones_own_on_ray(make_cluster, reward_file):
    spec = f"{reward_file}:score"
    pairs = [("1+1=", "2"), ("?", "hang"), ("1+2=", "2")]
    batch = make_batch(pairs, ground_truth=["2", "", "3"], tag=list("aaa"))
    cluster = make_cluster(backend="ray", reward_fn=spec, reward_timeout=3.0, world_size=2)
    padded, num_extra = pad_dataproto_to_divisor(batch, 2)
    result = unpad_dataproto(cluster.compute_rewards(padded), num_extra)
    cluster.execute_all_sync("close")
    scores = torch.tensor([1.5, math.nan, 0.5])
    torch.testing.assert_close(result.batch["scores"], scores, equal_nan=True)
    assert list(result.non_tensor_batch["drop_reason"]) == [None, "timeout", None]
    assert eventually(lambda: not marked(str(reward_file)))


def test_length_costs_what_the_config_says(make_cluster, reward_file):
    cluster = make_cluster(reward_fn=f"{reward_file}:score", response_length_penalty_coef=0.1)
    result = cluster.compute_rewards(make_batch([("1+1=", "2")], ground_truth=["2"], tag=["b"]))
    assert result.batch["scores"].tolist() == [1.0]
    # Two tokens: "2" and the end.
    torch.testing.assert_close(result.batch["response_level_rewards"], torch.tensor([0.8]))
    assert result.non_tensor_batch["reward_parts"][0]["length_penalty"] == pytest.approx(-0.2)


@pytest.mark.parametrize(
    ("worker", "responses", "columns"),
    [
        (MATH, ["2", "3"], {"ground_truth": ["2", "2"]}),
        (CHOICE, [r"\boxed{A}", "A"], {"ground_truth": ["A", "A"]}),
        (IFEVAL, ["a b", "a, b"], {"ground_truth": [{"func_name": "validate_no_commas"}] * 2}),
        (
            CODE,
            ["print(input())", "print(1)"],
            {"test_cases": [[{"stdin": "7", "expected_stdout": "7"}]] * 2},
        ),
    ],
)
def test_rewards_that_come_along(make_cluster, worker, responses, columns):
    cluster = make_cluster(worker_cls=worker)
    result = cluster.compute_rewards(make_batch([("?", text) for text in responses], **columns))
    assert result.batch["scores"].tolist() == [1.0, 0.0]
    assert list(result.non_tensor_batch["drop_reason"]) == [None, None]


def test_a_judge_that_is_down_drops_everything(make_cluster):
    judge = {"judge_api_url": "http://127.0.0.1:9/v1", "reward_timeout": 2.0}
    cluster = make_cluster(worker_cls=JUDGE, **judge)
    result = cluster.compute_rewards(make_batch([("?", "a"), ("?", "b")], ground_truth=["a", "a"]))
    assert result.batch["scores"].isnan().all()
    assert all("did not answer" in reason for reason in result.non_tensor_batch["drop_reason"])


def test_what_is_trained_on_may_differ_from_the_score(make_cluster):
    values = {"reward_type": "soft", "response_length_penalty_coef": 0.1}
    cluster = make_cluster(worker_cls=CROSSTHINK, **values)
    pairs = [("?", "B"), ("?", r"\boxed{A}"), ("?", "it is B it is B it is B")]
    result = cluster.compute_rewards(make_batch(pairs, ground_truth=["B", "B", ""]))
    assert result.batch["scores"].tolist()[:2] == [1.0, 0.0]
    # Right without a box 0.5, wrong in a box -0.5; one character is a token, and the end one more.
    expected = torch.tensor([0.5 - 0.2, -0.5 - 1.0, math.nan])
    found = result.batch["response_level_rewards"]
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert list(result.non_tensor_batch["drop_reason"]) == [None, None, "none"]


def test_a_judge_of_this_role(make_cluster, tmp_path):
    """A model that goes by the last character alone: a -> YES, b -> NO, c -> ?"""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tied=False, hidden_size=128, head_dim=64)
    follows = {"a": "Y", "Y": "E", "E": "S", "b": "N", "N": "O", "c": "?"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(model.config.vocab_size, 128))
        model.model.norm.weight.fill_(1.0)
        for token in range(len(tokenizer)):
            after = tokenizer.eos_token_id
            if tokenizer.decode([token]) in follows:
                after = tokenizer.convert_tokens_to_ids(follows[tokenizer.decode([token])])
            model.lm_head.weight[after, token] = 1.0
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    values = {
        "worker_cls": JUDGE,
        "judge_model_type": "inference",
        "judge_prompt": "{prompt} {ground_truth} {response}",
        "model_args": {"model_name_or_path": str(tmp_path), "dtype": "fp32"},
        "strategy_args": {"strategy_name": "hf_infer"},
        "generating_args": {"max_new_tokens": 8, "do_sample": False},
        "data_args": {"template": "base"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_rewards(RLVRConfig(prompt_length=8, response_length=8, rewards={"math": values}))
    cluster = make_cluster(**values)
    batch = make_batch([("?", text) for text in "abca"], ground_truth=list("xxxx"))
    result = cluster.compute_rewards(batch)
    scores = torch.tensor([1.0, 0.0, math.nan, 1.0])
    torch.testing.assert_close(result.batch["scores"], scores, equal_nan=True)
    assert list(result.non_tensor_batch["drop_reason"]) == [None, None, "none", None]


def test_a_reward_model(make_cluster, folder):
    cluster = make_cluster(
        worker_cls=f"{REWARDS}.RewardModelWorker",
        strategy_args={"strategy_name": "hf_infer"},
        model_args={"model_name_or_path": str(folder), "dtype": "fp32", "random_init": True},
    )
    batch = make_batch([("1+1=", "2"), ("1+1=", "345")])
    result = cluster.compute_rewards(batch)
    assert result.batch["scores"].shape == (2,) and result.batch["scores"].isfinite().all()
    assert list(result.non_tensor_batch["drop_reason"]) == [None, None]
    # Through its own chat template, the same words are other tokens.
    cluster.workers[0].shares_vocabulary = False
    again = cluster.compute_rewards(batch)
    assert again.batch["token_level_rewards"].shape == result.batch["token_level_rewards"].shape
    assert (again.batch["scores"] != result.batch["scores"]).all()


def test_the_config_of_a_reward(reward_file, monkeypatch):
    assert RewardConfig(reward_fn="mine.py:score").worker_cls == FUNCTION_REWARD_WORKER
    for values, message in [
        (
            {"reward_fn": "mine.py:score", "worker_cls": "a.B"},
            r"worker_cls: found .* expected no other worker_cls beside reward_fn",
        ),
        ({"reward_fn": "mine.py"}, r'reward_fn: found "mine.py" .* expected file.py:function'),
        ({"reward_timeout": 0}, "reward_timeout"),
    ]:
        with pytest.raises(ConfigError, match=message):
            RewardConfig(**values)
    values = {"reward_fn": "mine.py:score"}
    beside = RewardConfig.model_validate(values, context={"folder": reward_file.parent})
    assert beside.reward_fn == f"{reward_file}:score"
    monkeypatch.chdir(reward_file.parent)
    here = RewardConfig.model_validate(values, context={"folder": "/"})
    assert here.reward_fn == "mine.py:score"


INFERENCE = {"worker_cls": JUDGE, "judge_model_type": "inference"}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"reward_fn": "nowhere.py:score"},
            r"rewards.math.reward_fn: 'nowhere.py:score': there is no file",
        ),
        ({"reward_fn": "json:lods"}, "rewards.math.reward_fn: .* did you mean 'loads'"),
        (
            {"worker_cls": "no.such.Worker"},
            r"rewards.math: 'no.such.Worker': there is no module 'no'",
        ),
        ({"worker_cls": JUDGE}, "judge_api_url: missing"),
        (
            {"worker_cls": JUDGE, "judge_model_type": "cluster"},
            'found "cluster", expected "api".* or "inference"',
        ),
        (INFERENCE, "strategy_name: found no strategy, expected hf_infer"),
        (
            {**INFERENCE, "strategy_args": {"strategy_name": "hf_infer"}},
            "generating_args: missing",
        ),
        ({"worker_cls": JUDGE, "judge_prompt": "my-prompt"}, "judge_prompt: has no {response}"),
        (
            {"worker_cls": CROSSTHINK},
            "reward_type: found null, expected one of loose, soft, strict",
        ),
        (
            {"worker_cls": CODE, "reward_type": "fractoin"},
            'reward_type: found "fractoin", expected null or one of fraction',
        ),
    ],
)
def test_rewards_are_checked_before_anything_is_loaded(reward, message):
    config = RLVRConfig(prompt_length=8, response_length=8, rewards={"math": reward})
    with pytest.raises(ConfigError, match=message):
        check_rewards(config)


def test_rewards_that_work_pass_the_check(reward_file):
    rewards = {"mine": {"reward_fn": f"{reward_file}:score"}, "choice": {"worker_cls": CHOICE}}
    check_rewards(RLVRConfig(prompt_length=8, response_length=8, rewards=rewards))
    assert eventually(lambda: not marked(str(reward_file)))


class Unlisted(PoolRewardWorker):
    function = "roll.rewards.functions:choice_score"

    @classmethod
    def options_of(cls, reward_config):
        return {"variant": reward_config.reward_type}


EVERY_KEY = {
    "reward_timeout": 7.0,
    "reward_memory_mb": 99,
    "judge_prompt": "{response}",
    "judge_model_type": "api",
    "judge_model_name": "j",
    "judge_api_url": "http://127.0.0.1:9/v1",
    "judge_api_key": "k",
    "format_pattern": ".",
    "reward_type": "soft",
    "generating_args": {"max_new_tokens": 3},
    "data_args": {"template": "base"},
    "infer_batch_size": 3,
}
JUDGE_KEYS = {key for key in EVERY_KEY if key.startswith("judge_")}
LIMITS = {"reward_timeout", "reward_memory_mb"}


@pytest.mark.parametrize(
    ("reward", "reads"),
    [
        ({"reward_fn": "json:loads"}, LIMITS),
        ({"worker_cls": MATH}, {*LIMITS, "format_pattern"}),
        ({"worker_cls": CHOICE}, LIMITS),
        ({"worker_cls": IFEVAL}, {*LIMITS, "reward_type"}),
        ({"worker_cls": CROSSTHINK}, {*LIMITS, "reward_type"}),
        ({"worker_cls": JUDGE}, {*LIMITS, *JUDGE_KEYS}),
        (
            {**INFERENCE, "strategy_args": {"strategy_name": "hf_infer"}},
            {"judge_prompt", "judge_model_type", "generating_args", "data_args"}
            | {"infer_batch_size"},
        ),
        ({"worker_cls": f"{REWARDS}.RewardModelWorker"}, {"infer_batch_size"}),
        ({"worker_cls": Unlisted}, set(OPTIONAL_KEYS)),
    ],
)
def test_keys_that_a_reward_does_not_read_are_named(monkeypatch, reward, reads):
    monkeypatch.setattr("roll.rewards.check.check_reward_fn", lambda spec: None)
    assert EVERY_KEY.keys() == set(OPTIONAL_KEYS)
    sentence = check_reward(RewardConfig(**{**EVERY_KEY, **reward})) or ""
    named = set(sentence.partition(":")[0].split(", ")) - {""}
    assert named == set(OPTIONAL_KEYS) - reads


def test_the_warning_about_such_keys_names_the_reward():
    rewards = {"math": {"worker_cls": CHOICE, "judge_prompt": "x", "format_pattern": "y"}}
    config = RLVRConfig(prompt_length=8, response_length=8, rewards=rewards)
    message = "rewards.math: judge_prompt, format_pattern: no effect, MultipleChoiceBoxed"
    with pytest.warns(UserWarning, match=message):
        check_rewards(config)
