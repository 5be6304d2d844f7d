"""Run folders made up for tests of the report: no training, the same numbers for the same seed."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import yaml

MAP = "S F F\nF H F\nF F G"
WORDS = ["the", "of", "and", "to", "in", "is", "that", "it", "for", "as", "with", "was"]


def write_run(
    folder: Path,
    *,
    steps: int = 40,
    prompts: int = 8,
    samples_per_prompt: int = 4,
    seed: int = 0,
    pipeline: str = "rlvr",
    status: str = "finished",
    sick: bool = False,
) -> Path:
    """A run folder with metrics, config and samples; `sick` shows what the health panel seeks."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_metrics(folder, steps, random, sick=sick)
    write_about(folder, pipeline, steps, status)
    for step in range(0, steps, 2):
        records = []
        for prompt in range(prompts):
            task = "".join(random.choice(list("0123456789"), size=4))
            for sample in range(samples_per_prompt):
                if pipeline == "agentic":
                    record = trajectory(random, step, steps)
                else:
                    record = answer(random, step, steps, task, None, sick)
                about = {"sample": f"{prompt}_{sample}", "group": f"{step}-{prompt}"}
                records.append({**about, **record})
        set_advantages(records)
        reason = "timeout: the reward took longer than 5 s"
        if step % 4 == 0:
            reason = "no signal: all answers of the group scored 0"
        discarded = {"sample": f"dropped-{step}-0", "group": f"{step}-0", "dropped": reason}
        discarded |= {"prompt": "Reverse the digits: 7", "response": "I cannot.", "score": None}
        records.append({**discarded, "rewards": {}, "finish_reason": "stop"})
        write_rollouts(folder, step, records)
        if step % 10 == 0:
            val = [{**record, "split": "val"} for record in records[:8]]
            write_rollouts(folder, step, val, split="val")
    return folder


def write_rollouts(
    folder: Path, step: int, records: list[dict[str, Any]], split: str = "train"
) -> None:
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    name = f"{'step' if split == 'train' else 'val'}-{step:06d}.jsonl"
    lines = [json.dumps({"step": step, "split": split, **record}) for record in records]
    (folder / "rollouts" / name).write_text("".join(f"{line}\n" for line in lines))


def write_metrics(
    folder: Path, steps: int, random: np.random.Generator, *, sick: bool = False, extra: int = 0
) -> None:
    lines = []
    for step in range(steps):
        done = (step + 1) / steps
        level = 1 / (1 + math.exp(-8 * (done - 0.4)))
        noise = random.normal(size=8 + extra)
        jump = 25 if sick and step == steps // 2 else 0
        row = {
            "critic/score/mean": 0.05 + 0.88 * level + 0.02 * noise[0],
            "critic/kl": 0.02 + 0.1 * done + 0.004 * abs(noise[1]),
            "critic/entropy/mean": 1.6 - 1.2 * level + 0.03 * noise[2],
            "critic/zero_std_group_frac": (0.92 if sick and done > 0.5 else 0.15) + 0.02 * noise[3],
            "actor/ratio_mean@sum": (1 + 0.5 * done if sick else 1.0) + 0.002 * noise[4],
            "actor/pg_loss@sum": 0.01 * noise[5],
            "actor/grad_norm": 0.6 + 0.1 * abs(noise[6]) + jump,
            "actor/lr": 1e-3 * min(1, (step + 1) / 10),
            "actor/skipped_steps": 1.0 if sick and step == 7 else 0.0,
            "actor/clipfrac@sum": 0.03 * abs(noise[7]),
            "token/response_length/mean": 6 - 1.5 * level + 0.1 * noise[1],
            "time/step_total": 1.4 + 0.2 * abs(noise[2]),
            "time/step_generate": 0.9 + 0.1 * abs(noise[3]),
            "time/step_train": 0.4 + 0.05 * abs(noise[4]),
            "system/samples": 32.0 * (step + 1),
        }
        row |= {f"extra/metric_{i:03d}": float(noise[8 + i]) for i in range(extra)}
        if step % 10 == 0:
            row["val/exact_match"] = 0.04 + 0.9 * level
        if sick and step == 11:
            row["critic/kl"] = math.nan
        if sick and step > steps * 0.7:
            row["critic/kl"] += 2.0
        named = {key: value if math.isfinite(value) else "NaN" for key, value in row.items()}
        lines.append(json.dumps({"step": step, "time": 1.79e9 + 1.5 * step, **named}))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def write_about(folder: Path, pipeline: str, steps: int, status: str) -> None:
    about = {
        "pipeline": pipeline,
        "started": "2026-11-15T09:30:00",
        "roll": "0.1.0",
        "command": ["roll", "train", "reverse_digits.yaml"],
        "overrides": ["max_steps=40"],
        "status": status,
        "last_step": steps - 1,
        "summary": {"val/exact_match": {"before": 0.05, "after": 0.94}},
    }
    (folder / "run.json").write_text(json.dumps(about))
    config = {
        "exp_name": folder.name,
        "seed": 42,
        "max_steps": steps,
        "rollout_batch_size": 8,
        "prompt_length": 64,
        "response_length": 64,
        "sequence_length": 128,
        "pretrain": "models/digits",
        "adv_estimator": "grpo",
        "init_kl_coef": 0.02,
        "actor_train": {"training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 8}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def answer(
    random: np.random.Generator,
    step: int,
    steps: int,
    task: str,
    response_tokens: int | None,
    sick: bool,
) -> dict[str, Any]:
    """One answer to "reverse 1234", right more often the later the step; or so many words."""
    right = random.random() < 0.1 + 0.85 * step / max(steps - 1, 1)
    wanted = task[::-1]
    prompt = ["<|im_start|>", "user", "\n", "Reverse", " the", " digits", ":", " ", *task]
    prompt += ["<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    if response_tokens is None:
        said = list(wanted if right else "".join(random.permutation(list(wanted))))
        response = ["The", " answer", " is", " ", *said, ".", "<|im_end|>"]
        correct = float("".join(said) == wanted)
    else:
        words = (random.zipf(1.3, response_tokens) % 4000).astype(int)
        response = [f" {WORDS[w % len(WORDS)]}{w // len(WORDS) or ''}" for w in words.tolist()]
        correct = float(right)
    parts = {"length": round(random.random(), 3)}
    if sick:
        parts = {"format": 1.0}
    is_cut_off = random.random() < (0.5 if sick else 0.03)
    return {
        "samples_in_step": 32,
        "tag": "digits",
        "domain": "math",
        "prompt": "".join(prompt),
        "response": "".join(response),
        "ground_truth": wanted,
        "score": correct,
        "rewards": {"answer": correct, **parts},
        "dropped": None,
        "finish_reason": "length" if is_cut_off else "stop",
        "policy_version": step,
        "advantage": None,
        "tokens": tokens_of(random, prompt, response, step / max(steps, 1) if sick else 0.0),
    }


def tokens_of(
    random: np.random.Generator, prompt: list[str], response: list[str], drift: float = 0.0
) -> dict[str, Any]:
    """Token lists with plausible numbers, null on the prompt."""
    num_prompt, num = len(prompt), len(response)
    old = -random.exponential(0.5, num)
    columns = {
        "infer_log_probs": old - random.normal(0, 0.02 + 0.4 * drift, num),
        "old_log_probs": old,
        "ref_log_probs": old - random.normal(0.02, 0.08, num),
        "entropy": random.exponential(0.5, num),
        "advantages": np.zeros(num),
    }
    texts = prompt + response
    ids = [zlib.crc32(text.encode("utf-8", "replace")) % 50_000 for text in texts]
    tokens: dict[str, Any] = {"ids": ids, "text": texts, "mask": [0] * num_prompt + [1] * num}
    for name, values in columns.items():
        tokens[name] = [None] * num_prompt + [float(f"{v:.6g}") for v in values.tolist()]
    return tokens


def trajectory(random: np.random.Generator, step: int, steps: int) -> dict[str, Any]:
    """A walk over a small frozen lake: observation, answer, observation, answer ..."""
    won = random.random() < 0.1 + 0.8 * step / max(steps - 1, 1)
    moves = ["Right", "Right", "Down", "Down"] if won else ["Right", "Down"]
    texts, mask, turns = [], [], []
    for i, move in enumerate(moves):
        reward = float(won and i == len(moves) - 1)
        seen = f"Turn {i + 1}. You see:\n{MAP}\nWhere to?"
        observed = ["<|im_start|>", "user", "\n", *(f"{word} " for word in seen.split(" "))]
        observed += ["<|im_end|>", "\n"]
        said = ["<think>", "I", " should", " go", f" {move.lower()}", ".", "</think>"]
        said += ["<answer>", move, "</answer>", "<|im_end|>"]
        for role, words in (("observation", observed), ("response", said)):
            turns.append({"role": role, "start": len(texts), "end": len(texts) + len(words)})
            turns[-1]["reward"] = reward if role == "response" else None
            texts += words
            mask += [int(role == "response")] * len(words)
    tokens = tokens_of(random, [], texts)
    for key in ("infer_log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages"):
        tokens[key] = [value if m else None for value, m in zip(tokens[key], mask, strict=True)]
    tokens["mask"] = mask
    return {
        "tag": "FrozenLake",
        "prompt": "".join(texts[: turns[0]["end"]]),
        "response": "".join(texts[turns[0]["end"] :]),
        "score": float(won),
        "rewards": {},
        "dropped": None,
        "finish_reason": "stop",
        "policy_version": step,
        "tokens": tokens,
        "turns": turns,
    }


def set_advantages(records: list[dict[str, Any]]) -> None:
    """Score minus the mean of its group, over its standard deviation, on every trained token."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["group"], []).append(record)
    for members in groups.values():
        scores = np.array([record["score"] for record in members])
        for record in members:
            value = (record["score"] - scores.mean()) / (scores.std() + 1e-6)
            record["advantage"] = float(f"{value:.6g}")
            tokens = record["tokens"]
            tokens["advantages"] = [record["advantage"] if m else None for m in tokens["mask"]]


HOSTILE = {
    "script": "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>",
    "entities": "&lt;b&gt; <b>bold</b> <!-- comment --> ]]> {{ template }} ${code}",
    "right-to-left": "left \u202eright to left\u202c \u200f \u05e9\u05dc\u05d5\u05dd \u2066isolate",
    "separators": "line\u2028separator\u2029paragraph\u0000nul\u001b[31m\ufffebom\ufeff",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 ⚠️ " + "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "broken": "\ufffd \ud800 lone surrogate",
    "long line": "x" * 1_000_000,
    "many lines": "\n" * 3000,
}


def write_hostile_run(folder: Path) -> Path:
    """Samples whose texts try to break the page: each once as plain text and once as tokens."""
    random = np.random.default_rng(0)
    write_run(folder, steps=2, prompts=1, samples_per_prompt=2)
    records = []
    for name, text in HOSTILE.items():
        plain = {"group": text[:300], "prompt": text, "response": text, "tag": text[:300]}
        plain["score"] = 1.0
        tokens = tokens_of(random, ["prompt: "], [text, "<|im_end|>"])
        facts = {"ground_truth": text, "rewards": {text[:40]: 1.0}}
        facts["dropped"] = text[:300] if name == "script" else None
        records.append({**plain, "sample": f"plain {name}"})
        records.append({**plain, "sample": f"tokens {name}", "tokens": tokens, **facts})
    write_rollouts(folder, 0, records)
    about = json.loads((folder / "run.json").read_text())
    about |= {"pipeline": HOSTILE["script"], "status": HOSTILE["script"]}
    about["command"] = [HOSTILE["script"]]
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "config.yaml").write_text(yaml.safe_dump({HOSTILE["script"]: HOSTILE["entities"]}))
    metrics = {"step": 0, "time": 0.0, HOSTILE["script"]: 1.0, "actor/<b>bold</b>": 2.0}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    return folder
