"""GRPO steps per second, side by side with TRL's GRPOTrainer: same model, prompts, samples, reward
and optimizer.

    python benchmarks/grpo_vs_trl.py [--steps 20] [--rounds 3] [--model FOLDER] [--threads N]
    python benchmarks/grpo_vs_trl.py --gpu --steps 3 --rounds 1

Every step answers 4 prompts with 8 samples of at most 32 tokens at temperature 1 (32 completions),
scores them with one reward, and takes one optimizer step on them. Without --model a Qwen2 of
138,000 random parameters with a byte-level BPE tokenizer of 512 tokens is made on the spot;
`--characters` takes the one of `roll.models.tiny` instead, with one token for each character and so
three times longer prompts. With `--gpu` it is one of the shape of Qwen2.5-0.5B in bfloat16 on the
first GPU, and a step answers 32 prompts with 8 samples of 256 tokens, trained 32 at a time; both
sides generate without vLLM. The two take turns, `--rounds` times, each in a process of its own, and
the fastest round of each counts: other work on the machine only ever makes a round slower. Needs
`pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAMPLES = 8  # of a prompt
WARM_UP = 2  # steps before the clock starts


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a step is, and where."""

    prompts: int
    tokens: int  # of a sample
    micro_batch: int  # samples that are trained at a time
    learning_rate: float
    dtype: str
    model: dict[str, int]
    on_gpu: bool = False


SMALL = Setting(
    prompts=4,
    tokens=32,
    micro_batch=32,
    learning_rate=3e-3,
    dtype="fp32",
    model={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
)
HALF_A_BILLION = Setting(
    prompts=32,
    tokens=256,
    micro_batch=32,
    learning_rate=1e-6,
    dtype="bf16",
    model={
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    on_gpu=True,
)
REWARD = '''
def score(prompt, response, ground_truth, **row):
    """The share of digits: a random model has some, and can learn to have more."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
'''


def make_inputs(folder: Path, setting: Setting, characters: bool) -> None:
    rows = [{"prompt": f"add {a} plus {b} equals "} for a in range(20) for b in range(10)]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    if characters:
        from roll.models.tiny import make_tiny_model

        make_tiny_model(folder / "model", seed=0)
    else:
        make_bpe_model(folder / "model", setting, [row["prompt"] for row in rows])


def make_bpe_model(folder: Path, setting: Setting, texts: list[str]) -> None:
    """Heads that share their keys and values, random weights; tokens as a real model has them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        **setting.model,
        max_position_embeddings=1024,
        tie_word_embeddings=setting.on_gpu,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).to(
        torch.bfloat16 if setting.on_gpu else torch.float32
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_roll(folder: Path, model: str, setting: Setting, steps: int) -> dict[str, float]:
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig
    from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline

    role: dict[str, Any] = {
        "model_args": {"dtype": setting.dtype, "disable_gradient_checkpointing": True}
    }
    role |= {"device_mapping": [0]} if setting.on_gpu else {}
    training = {
        "learning_rate": setting.learning_rate,
        "per_device_train_batch_size": setting.micro_batch,
        "gradient_accumulation_steps": setting.prompts * SAMPLES // setting.micro_batch,
    }
    config = RLVRConfig(
        exp_name="roll",
        output_dir=tempfile.mkdtemp(dir=folder),
        track_with="none",
        max_steps=WARM_UP + steps,
        save_steps=10**6,
        eval_steps=-1,
        pretrain=model,
        prompt_length=64,
        response_length=setting.tokens,
        global_template="base",
        rollout_batch_size=setting.prompts,
        num_gpus_per_node=int(setting.on_gpu),
        num_return_sequences_in_group=SAMPLES,
        adv_estimator="grpo",
        loss_agg_mode="token-mean",
        init_kl_coef=0,
        actor_train={
            **role,
            "data_args": {"file_name": str(folder / "prompts.jsonl")},
            "training_args": training,
            "strategy_args": {"strategy_name": "hf_train"},
            "infer_batch_size": setting.micro_batch,
        },
        actor_infer={
            **role,
            "generating_args": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
            "strategy_args": {"strategy_name": "hf_infer"},
        },
        rewards={"digits": {"reward_fn": f"{folder / 'reward.py'}:score"}},
    )
    times: list[float] = []
    scores: list[float] = []

    class Timed(RLVRPipeline):
        def end_step(self, step: int, metrics: dict[str, Any]) -> None:
            times.append(time.perf_counter())
            scores.append(metrics["critic/score/mean"])
            super().end_step(step, metrics)

        def save_checkpoint(self, *, keep: bool = False) -> Path:
            return self.run_dir  # TRL saves nothing either

    with Timed(config, progress=False) as pipeline:
        pipeline.run()
    return {
        "seconds": (times[-1] - times[WARM_UP - 1]) / steps,
        "first": scores[0],
        "last": scores[-1],
    }


def run_trl(folder: Path, model: str, setting: Setting, steps: int) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(folder))
    from reward import score  # the very same function

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16 if setting.on_gpu else torch.float32
    )
    rows = [
        json.loads(line)
        for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [
            score(prompt, text, None) for prompt, text in zip(prompts, completions, strict=True)
        ]

    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=setting.prompts * SAMPLES // setting.micro_batch,
        num_generations=SAMPLES,
        max_completion_length=setting.tokens,
        max_steps=WARM_UP + steps,
        learning_rate=setting.learning_rate,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=not setting.on_gpu,
        bf16=setting.on_gpu,
        fp16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        beta=0.0,
        seed=0,
        temperature=1.0,
    )
    trainer = GRPOTrainer(
        model=policy,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=reward,
        callbacks=[Clock()],
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return {
        "seconds": (times[-1] - times[WARM_UP - 1]) / steps,
        "first": rewards[0],
        "last": rewards[-1],
    }


def measure(
    name: str, folder: Path, model: str, setting: Setting, steps: int, threads: int
) -> dict[str, float]:
    """One round of one of the two, in a process of its own; its last line is the result."""
    command = [
        sys.executable,
        __file__,
        "--only",
        name,
        "--folder",
        str(folder),
        "--model",
        model,
        "--steps",
        str(steps),
        *(["--gpu"] if setting.on_gpu else []),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "ROLL_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", default=None)
    parser.add_argument("--characters", action="store_true", help="one token for each character")
    parser.add_argument(
        "--gpu", action="store_true", help="half a billion parameters on the first GPU"
    )
    parser.add_argument("--only", choices=["roll", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    setting = HALF_A_BILLION if args.gpu else SMALL
    if args.only:
        runner = run_roll if args.only == "roll" else run_trl
        print(json.dumps(runner(args.folder, args.model, setting, args.steps)))
        return
    if args.gpu and args.characters:
        parser.error("--characters is for the small model: leave out --gpu")
    if args.gpu:
        import torch

        if not torch.cuda.is_available():
            parser.error(
                "--gpu needs an NVIDIA GPU, and torch sees none; leave it out for a small model on the CPU"
            )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, setting, args.characters)
        model = args.model or str(folder / "model")
        rounds: dict[str, list[dict[str, float]]] = {"trl": [], "roll": []}
        for number in range(args.rounds):
            for who, results in rounds.items():
                results.append(measure(who, folder, model, setting, args.steps, args.threads))
                print(
                    f"round {number + 1}: {who:4s} {results[-1]['seconds']:.3f} s a step",
                    flush=True,
                )
    best = {who: min(result["seconds"] for result in results) for who, results in rounds.items()}
    print(f"\n{'':6s}{'s/step':>8s}{'steps/s':>9s}{'reward, first and last step':>30s}")
    for who in best:
        last = rounds[who][-1]
        print(
            f"{who:6s}{best[who]:8.3f}{1 / best[who]:9.2f}{last['first']:22.3f} -> {last['last']:.3f}"
        )
    print(
        f"\nroll takes {best['trl'] / best['roll']:.1f} times as many steps per second as TRL "
        f"({setting.prompts * SAMPLES} completions of {setting.tokens} tokens, "
        f"{'on a GPU' if setting.on_gpu else f'{args.threads} threads'}, best of {args.rounds})."
    )


if __name__ == "__main__":
    main()
