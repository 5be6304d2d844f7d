"""The loss of an agentic actor, alone: no cluster, no model, random logits.

    python examples/agentic_loss.py

Two trajectories of two turns each: the mask is 1 on tokens that the policy wrote, 0 on what the
environment said.
"""

import torch

from roll.configs.worker_config import WorkerConfig
from roll.distributed.scheduler.protocol import DataProto
from roll.ops.log_probs import next_token_log_probs
from roll.pipeline.agentic.agentic_config import AgenticConfig
from roll.pipeline.base_worker import ActorWorker

VOCABULARY, LENGTH = 32, 12


def main() -> None:
    torch.manual_seed(0)
    response_mask = torch.tensor(
        [
            [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0],
            [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1],
        ]
    )
    input_ids = torch.randint(VOCABULARY, response_mask.shape)
    logits = torch.randn(*response_mask.shape, VOCABULARY, requires_grad=True)

    # One column fewer than tokens: column t speaks of token t+1. The old policy is a little
    # different from this one.
    log_probs, _ = next_token_log_probs(logits.detach(), input_ids, response_mask)
    old_log_probs = log_probs + 0.2 * torch.randn_like(log_probs)
    data = DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(response_mask),
            "response_mask": response_mask,
            "old_log_probs": old_log_probs,
            "ref_log_probs": old_log_probs + 0.1 * torch.randn_like(log_probs),
            "infer_logprobs": old_log_probs + 0.02 * torch.randn_like(log_probs),
            "advantages": torch.randn(len(response_mask), 1).expand_as(log_probs),
        }
    )
    actor_worker = ActorWorker(WorkerConfig(name="actor_train"))
    actor_worker.pipeline_config = AgenticConfig(
        sequence_length=LENGTH,
        ratio_type="segment",  # one importance ratio for each turn
        use_kl_loss=True,
        kl_loss_coef=0.01,
        entropy_loss_coef=0.001,
        # compare with the inference engine here, not on the driver
        force_disable_old_logprobs_recompute=True,
    )
    loss, metrics = actor_worker.loss_func(data=data, output_tensor=logits)
    (gradient,) = torch.autograd.grad(loss, logits)

    print(f"loss {loss.item():.4f}, gradient norm {gradient.norm().item():.4f}")
    for name, value in sorted(metrics.items()):
        print(f"  {name:48s} {value: .4f}")


if __name__ == "__main__":
    main()
