"""The sampling loop on one real GPU: the tokens of the CPU, and log-probabilities of a
teacher-forced forward."""

import pytest
import torch
from tiny_models import tiny_model

from roll.engines.hf_engine import HFEngine
from roll.engines.request import GenerationRequest, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def requests_of(**sampling):
    generator = torch.Generator().manual_seed(0)
    return [
        GenerationRequest(
            f"r{index}",
            tuple(torch.randint(4, 99, (length,), generator=generator).tolist()),
            SamplingParams(max_new_tokens=40, **sampling),
            num_samples=4,
        )
        for index, length in enumerate((3, 17, 9, 9, 30))
    ]


def answers(device, requests, dtype=torch.float32):
    model = tiny_model(dtype=dtype).to(device).eval()
    # Many end tokens: rows leave the batch all the time.
    engine = HFEngine(model, pad_token_id=0, eos_token_ids=range(0, 100, 9))
    return model, engine.generate(requests)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.0}, {"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2}]
)
def test_samples_are_those_of_the_cpu(sampling):
    requests = requests_of(**sampling)
    _, here = answers("cpu", requests)
    _, there = answers("cuda", requests)
    assert [output.token_ids for output in here] == [output.token_ids for output in there]
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(
            torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_log_probs_are_those_of_a_teacher_forced_forward(dtype, tolerance):
    requests = requests_of()
    model, outputs = answers("cuda", requests, dtype)
    request_named = {request.request_id: request for request in requests}
    for output in outputs:
        given = request_named[output.request_id].prompt_ids
        ids = torch.tensor([[*given, *output.token_ids]], device="cuda")
        with torch.no_grad():
            log_probs = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        expected = log_probs[len(given) - 1 : -1].gather(-1, ids[0, len(given) :, None])[:, 0].cpu()
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=tolerance)


def test_requests_are_batched_by_the_memory_that_is_free():
    model = tiny_model().to("cuda").eval()
    engine = HFEngine(model, pad_token_id=0, eos_token_ids=())
    assert engine._rows_that_fit(512) > 1000
    assert engine._rows_that_fit(10**9) < 1000
