"""GRPO in one file: a tiny model learns to reverse digit strings, on a laptop's CPU, in about a
minute.

    python examples/grpo_minimal.py [--seed 0] [--steps 25] [--shuffle-rewards]

Nothing is downloaded: the model starts from random weights. A short supervised warm start teaches
it the format and a third of the answers; GRPO then improves it with nothing but a right/wrong
signal. `--shuffle-rewards` is the control experiment: the same training with the rewards dealt to
the wrong samples must not learn.

Names carry their axes: P prompts, G samples per prompt, B = P*G rows, S tokens of a row, T = S-1
predictions. Everything that is mathematics comes from `roll.algorithms`; everything else is here,
top to bottom.
"""

import argparse
import random
import time

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from roll.algorithms.policy_loss import policy_loss
from roll.algorithms.rewards import group_index, normalize_rewards
from roll.algorithms.surrogates import PPOClip

DIGITS, ARROW, END, VOCABULARY = (
    range(10),
    10,
    11,
    12,
)  # token ids: ten digits, "<" after the question, end of answer
LENGTH = 5  # digits in a string
PROMPT, ANSWER = LENGTH + 1, LENGTH + 1  # "12345<" and "54321" + END
GROUP = 8  # samples per prompt
PROMPTS = 128  # prompts per step
MINI_BATCHES = 2  # optimizer steps per batch of samples
CLIP = 0.2


def make_strings(num: int, seed: int) -> Tensor:
    """`num` different digit strings, (num, LENGTH)."""
    rng = random.Random(seed)
    seen: dict[tuple[int, ...], None] = {}
    while len(seen) < num:
        seen.setdefault(tuple(rng.choice(DIGITS) for _ in range(LENGTH)))
    return torch.tensor(list(seen))


def with_question(strings_P: Tensor) -> Tensor:
    return torch.cat([strings_P, torch.full((len(strings_P), 1), ARROW)], dim=1)


def with_answer(strings_P: Tensor) -> Tensor:
    return torch.cat([strings_P.flip(1), torch.full((len(strings_P), 1), END)], dim=1)


def make_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
    )
    return Qwen2ForCausalLM(config).float()


def answer_log_probs(model: Qwen2ForCausalLM, ids_BS: Tensor) -> Tensor:
    """Log-probability of every token after the first, (B, T): column t speaks of token t+1."""
    logits_BTV = model(ids_BS[:, :-1], use_cache=False).logits
    return torch.log_softmax(logits_BTV, dim=-1).gather(-1, ids_BS[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def sample(
    model: Qwen2ForCausalLM, prompts_P: Tensor, group: int, greedy: bool = False
) -> tuple[Tensor, Tensor]:
    """`group` answers to each prompt: token ids (P*group, S), and log-probs of the sampled tokens
    (P*group, ANSWER).

    The prompt is computed once and its cache repeated for the samples of its group.
    """
    cache = DynamicCache()
    logits_BV = model(prompts_P, past_key_values=cache, use_cache=True).logits[:, -1]
    cache.batch_repeat_interleave(group)
    logits_BV = logits_BV.repeat_interleave(group, dim=0)
    tokens, log_probs = [], []
    for position in range(ANSWER):
        log_probs_BV = torch.log_softmax(logits_BV, dim=-1)
        token_B1 = (
            log_probs_BV.argmax(-1, keepdim=True)
            if greedy
            else torch.multinomial(log_probs_BV.exp(), 1)
        )
        tokens.append(token_B1)
        log_probs.append(log_probs_BV.gather(1, token_B1))
        if position < ANSWER - 1:
            logits_BV = model(token_B1, past_key_values=cache, use_cache=True).logits[:, -1]
    ids_BS = torch.cat([prompts_P.repeat_interleave(group, dim=0), *tokens], dim=1)
    return ids_BS, torch.cat(log_probs, dim=1)


def response_mask(ids_BS: Tensor) -> Tensor:
    """True on the sampled tokens up to and including the first END, (B, S)."""
    mask_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
    ended_before = (ids_BS[:, PROMPT:] == END).cumsum(1) - (ids_BS[:, PROMPT:] == END).long()
    mask_BS[:, PROMPT:] = ended_before == 0
    return mask_BS


def score(ids_BS: Tensor) -> Tensor:
    """1 for the exact reversed string followed by END, else 0, (B,)."""
    return (ids_BS[:, PROMPT:] == with_answer(ids_BS[:, :LENGTH])).all(1).float()


def accuracy(model: Qwen2ForCausalLM, held_out_P: Tensor) -> float:
    ids_PS, _ = sample(model, with_question(held_out_P), group=1, greedy=True)
    return score(ids_PS).mean().item()


def warm_start(
    model: Qwen2ForCausalLM, strings: Tensor, held_out: Tensor, target: float = 0.35
) -> float:
    """Supervised steps until the model answers a third of the held-out questions."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
    for step in range(400):
        batch_P = strings[torch.randint(len(strings), (64,))]
        ids_PS = torch.cat([with_question(batch_P), with_answer(batch_P)], dim=1)
        loss = -answer_log_probs(model, ids_PS)[:, PROMPT - 1 :].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        if step % 10 == 9:
            reached = accuracy(model, held_out)
            print(
                f"  warm start, step {step + 1:3d}: loss {loss.item():.3f}, accuracy {reached:.2f}"
            )
            if reached >= target:
                return reached
    return accuracy(model, held_out)


def grpo_step(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    prompts_P: Tensor,
    shuffle_rewards: bool,
) -> dict[str, float]:
    """Sample, score, normalise within each group, then one pass of clipped policy gradient over the
    samples."""
    ids_BS, sampled_BA = sample(model, prompts_P, GROUP)
    rewards_B = score(ids_BS)
    if shuffle_rewards:
        rewards_B = rewards_B[torch.randperm(len(rewards_B))]
    groups_B = group_index(len(rewards_B), size=GROUP)
    advantages_B = normalize_rewards(rewards_B, mean="group", std="group", groups=groups_B)
    mask_BT = response_mask(ids_BS)[:, 1:]
    old_BT = torch.zeros(mask_BT.shape)
    old_BT[:, PROMPT - 1 :] = sampled_BA
    # The count of the whole batch: the mini-batches then add up to one well-defined loss, whatever
    # their sizes.
    num_tokens = mask_BT.sum() / MINI_BATCHES

    metrics = {
        "reward": rewards_B.mean().item(),
        "signal": (advantages_B != 0).float().mean().item(),
    }
    for rows in torch.randperm(len(ids_BS)).chunk(MINI_BATCHES):
        loss = policy_loss(
            log_probs_BT=answer_log_probs(model, ids_BS[rows]),
            old_log_probs_BT=old_BT[rows],
            advantages_BT=advantages_B[rows, None].expand_as(mask_BT[rows]),
            mask_BT=mask_BT[rows],
            surrogate=PPOClip(clip_low=CLIP, clip_high=CLIP),
            agg_mode="token-mean",
            num_tokens=num_tokens,
        )
        optimizer.zero_grad()
        loss.total.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        metrics["grad_norm"] = grad_norm.item()
    schedule.step()
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=25, help="GRPO steps")
    parser.add_argument(
        "--shuffle-rewards", action="store_true", help="control experiment: must not learn"
    )
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    started = time.monotonic()

    strings = make_strings(20_500, seed=args.seed)
    held_out, strings = strings[:500], strings[500:]
    model = make_model()
    num_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"A Qwen2 of {num_parameters:,} random parameters learns to reverse {LENGTH} digits: 12345< -> 54321."
    )
    before = warm_start(model, strings, held_out)

    print(
        f"GRPO: {PROMPTS} prompts x {GROUP} samples a step, reward 1 for the exact answer, else 0."
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    warm_up_then_decay = lambda step: min((step + 1) / 5, 1.0) * max(1 - step / 60, 0.1)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_decay)
    for step in range(1, args.steps + 1):
        prompts_P = with_question(strings[torch.randint(len(strings), (PROMPTS,))])
        metrics = grpo_step(model, optimizer, schedule, prompts_P, args.shuffle_rewards)
        bar = "#" * round(30 * metrics["reward"])
        line = f"  step {step:3d}  reward {metrics['reward']:.2f} |{bar:<30}| grad norm {metrics['grad_norm']:.2f}"
        print(
            line
            + (f"  held-out accuracy {accuracy(model, held_out):.3f}" if step % 5 == 0 else ""),
            flush=True,
        )

    after = accuracy(model, held_out)
    shown, _ = sample(model, with_question(held_out[:3]), group=1, greedy=True)
    for row in shown.tolist():
        print("  " + "".join("0123456789<."[token] for token in row))
    print(
        f"Held-out accuracy: {before:.3f} before, {after:.3f} after, in {time.monotonic() - started:.0f} s."
    )


if __name__ == "__main__":
    main()
