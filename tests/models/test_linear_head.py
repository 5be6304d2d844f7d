"""A model with linear logits computes what the plain model computes."""

import copy
import warnings
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from roll.configs.arguments import ModelArguments
from roll.models.linear_head import HeadOutput, use_linear_logits
from roll.models.lora import add_lora
from roll.ops.linear_logits import LinearLogits

FAMILIES = ["qwen2", "qwen3", "llama", "gemma2", "cohere", "granite"]
# Strong enough to bend the logits of the tiny model, which are around 1.
SOFT_CAP = {"final_logit_softcapping": 1.5}


@pytest.fixture(autouse=True)
def no_warnings():
    """Building a logits tensor warns, so silence is part of what most of these tests claim."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def head_output(**changes: Any) -> HeadOutput:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, 4, generator=generator)
    weight = torch.randn(6, 4, generator=generator)
    return HeadOutput(**{"hidden": hidden, "weight": weight, **changes})


def plain(value: HeadOutput) -> Tensor:
    return nn.functional.linear(value.hidden, value.weight, value.bias)


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a loss that weighs every logit differently."""
    model.zero_grad()
    logits = model(**batch).logits
    logits = logits.materialize() if isinstance(logits, LinearLogits) else logits
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (logits.log_softmax(-1) * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_gradients_as_the_plain_model(family, tied):
    model = tiny_model(family, tied=tied, **(SOFT_CAP if family == "gemma2" else {}))
    batch = tiny_batch([9, 5, 1])
    expected = model(**batch).logits
    expected_gradients = gradients(model, batch)
    names = list(model.state_dict())

    assert use_linear_logits(model)
    output = model(**batch).logits

    assert isinstance(output, LinearLogits)
    assert torch.equal(output.materialize(), expected)
    assert output.weight is model.get_output_embeddings().weight
    assert list(model.state_dict()) == names
    found = gradients(model, batch)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-6, atol=1e-6)


def test_what_a_family_does_after_the_head_becomes_fields():
    batch = tiny_batch([3])
    fields = {}
    for family in ("llama", "gemma2", "cohere", "granite"):
        model = tiny_model(family)
        use_linear_logits(model)
        output = model(**batch).logits
        fields[family] = (output.scale, output.soft_cap)
    assert fields == {
        "llama": (1.0, None),
        "gemma2": (1.0, 30.0),
        "cohere": (0.0625, None),
        "granite": (0.125, None),
    }


def test_a_head_with_bias():
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(0)
    model = PhiForCausalLM(
        PhiConfig(
            vocab_size=50,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    ).eval()
    nn.init.normal_(model.lm_head.bias)
    ids = torch.arange(6).view(2, 3)
    expected = model(ids).logits
    assert use_linear_logits(model)
    output = model(ids).logits
    assert output.bias is model.lm_head.bias
    assert torch.equal(output.materialize(), expected)


def test_generate_and_labels_build_the_tensor_and_give_the_same():
    model = tiny_model().eval()
    batch = tiny_batch([5, 5])
    prompt = {key: batch[key] for key in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 6, "do_sample": False}
    tokens = model.generate(**prompt, **settings)
    loss = model(**batch, labels=batch["input_ids"]).loss
    expected = model(**batch).logits
    assert use_linear_logits(model) and use_linear_logits(model)  # twice is once
    assert torch.equal(model(**batch).logits.materialize(), expected)
    with pytest.warns(RuntimeWarning, match="logits tensor"):
        assert torch.equal(model.generate(**prompt, **settings), tokens)
    with pytest.warns(RuntimeWarning, match="logits tensor"):
        assert torch.equal(model(**batch, labels=batch["input_ids"]).loss, loss)


def test_a_copy_of_the_model_uses_its_own_head():
    model = tiny_model(tied=False)
    use_linear_logits(model)
    twin = copy.deepcopy(model)
    output = twin(**tiny_batch([4])).logits
    assert output.weight is twin.lm_head.weight
    assert output.weight is not model.lm_head.weight


def test_the_value_model_has_no_head_to_replace():
    with pytest.raises(ValueError, match="no output embedding"):
        use_linear_logits(tiny_model().model)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("before_peft", [True, False])
@pytest.mark.parametrize("additional", [None, "lm_head"])
def test_through_peft_with_the_head_frozen_or_trained(tied, before_peft, additional):
    args = ModelArguments(lora_target="all", additional_target=additional)

    def wrapped(*, linear_first):
        torch.manual_seed(0)
        model = tiny_model(tied=tied)
        assert not linear_first or use_linear_logits(model)
        return add_lora(model, args, is_trainable=True)

    plain, model = wrapped(linear_first=False), wrapped(linear_first=before_peft)
    assert use_linear_logits(model)
    batch = tiny_batch([6, 2])
    output = model(**batch).logits
    assert torch.equal(output.materialize(), plain(**batch).logits)
    assert output.weight.requires_grad == (additional is not None)
    found, expected = gradients(model, batch), gradients(plain, batch)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-6)


def test_an_adapter_on_the_head_keeps_plain_logits():
    wrapped = add_lora(
        tiny_model(tied=False), ModelArguments(lora_target="q_proj,lm_head"), is_trainable=True
    )
    with pytest.warns(RuntimeWarning, match="lora.layer.Linear"):
        assert not use_linear_logits(wrapped)
    assert isinstance(wrapped(**tiny_batch([4])).logits, Tensor)


def test_an_adapter_put_on_a_replaced_head_still_gives_right_logits():
    model = tiny_model(tied=False)
    use_linear_logits(model)
    torch.manual_seed(0)
    wrapped = add_lora(model, ModelArguments(lora_target="lm_head"), is_trainable=True)
    nn.init.normal_(wrapped.base_model.model.lm_head.lora_B["default"].weight)
    batch = tiny_batch([4])
    with pytest.warns(RuntimeWarning, match="logits tensor"):
        found = wrapped(**batch).logits
    layer = wrapped.base_model.model.lm_head
    del layer.base_layer.forward
    assert torch.equal(found, wrapped(**batch).logits)


def test_arithmetic_follows_the_tensor():
    logits = head_output(bias=torch.linspace(-1, 1, 6))
    tensor = plain(logits)
    cases = [
        (logits * 0.5, tensor * 0.5),
        (3 * logits, 3 * tensor),
        (logits / 4, tensor / 4),
        (torch.tanh(logits / 2.0) * 2.0, torch.tanh(tensor / 2.0) * 2.0),
        (nn.functional.tanh(logits / 49.0) * 49.0, torch.tanh(tensor / 49.0) * 49.0),
        (5.0 * (logits * 3.0 / 5.0).tanh(), 5.0 * (tensor * 3.0 / 5.0).tanh()),
        (torch.tanh(logits) * 2 / 8, torch.tanh(tensor) * 2 / 8),
        (logits[..., :4], tensor[..., :4]),
        (logits[..., :99], tensor),
        (logits[:, 1:], tensor[:, 1:]),
        (logits[1], tensor[1]),
        (logits[-1, -1], tensor[-1, -1]),
        (
            logits[torch.tensor([[True, False, True], [False, True, False]])],
            tensor[[0, 0, 1], [0, 2, 1]],
        ),
        (logits.contiguous(), tensor),
        (logits.float(), tensor),
        (logits.to(torch.float64), tensor.double()),
    ]
    for found, expected in cases:
        assert isinstance(found, HeadOutput)
        assert found.shape == expected.shape
        assert found.materialize().dtype == expected.dtype
        torch.testing.assert_close(found.materialize(), expected, rtol=1e-6, atol=1e-6)


def test_soft_caps_and_dtypes_are_exact():
    for cap in range(1, 200):
        assert (torch.tanh(head_output() / float(cap)) * float(cap)).scale == 1.0
    half = head_output(hidden=torch.ones(1, 2, 4).bfloat16(), weight=torch.ones(6, 4).bfloat16())
    assert half.materialize().dtype == torch.bfloat16
    assert half.float().materialize().dtype == torch.float32


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1.0,
        lambda x: x - x.mean(),
        lambda x: x * torch.tensor(2.0),
        lambda x: x / torch.tensor(2.0),
        lambda x: torch.tanh(torch.tanh(x)),
        lambda x: torch.tanh(x) * -1.0,
        lambda x: x[:, -1, :],
        lambda x: x[..., 1:],
        lambda x: x[0, :, [1, 2]],
        lambda x: x[x > 0],
        lambda x: x.softmax(-1),
        lambda x: torch.cat([x, x]),
        lambda x: nn.functional.log_softmax(x, dim=-1),
        lambda x: x.to(device="cpu", dtype=torch.float64),
        lambda x: -x,
        lambda x: 1.0 - x,
        lambda x: 1.0 / x,
        lambda x: torch.ones(6) * x,
        lambda x: x**2,
        lambda x: x >= 0,
    ],
)
def test_anything_else_builds_the_tensor_and_says_so(operation):
    logits = head_output()
    with pytest.warns(RuntimeWarning, match="logits tensor"):
        found = operation(logits)
    assert isinstance(found, Tensor)
    assert torch.equal(found, operation(plain(logits)))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__((..., 0), -1.0),
        lambda x: x.div_(2.0),
        lambda x: torch.relu_(x),
        lambda x: nn.functional.relu(x, inplace=True),
    ],
)
def test_writing_into_the_logits_is_an_error_and_not_lost(write):
    with pytest.raises(TypeError, match="writes into its logits"):
        write(head_output())


def test_a_model_that_writes_into_its_logits_keeps_them():
    model = tiny_model()
    model.config.model_type = "chameleon"
    with pytest.warns(RuntimeWarning, match="Qwen2ForCausalLM keeps building.*writes into them"):
        assert not use_linear_logits(model)
    assert isinstance(model(**tiny_batch([3])).logits, Tensor)


def test_probing_for_attributes_builds_nothing():
    logits = head_output()
    assert not hasattr(logits, "full_tensor")
    assert not hasattr(logits, "_local_tensor")
    assert not torch.is_tensor(logits)
    assert copy.copy(logits).weight is logits.weight
    assert repr(logits).startswith("HeadOutput(")


def test_pytree_sees_the_tensors_and_keeps_the_rest():
    logits = (torch.tanh(head_output() / 2.0) * 2.0)[..., :5].float()
    leaves, spec = pytree.tree_flatten(logits)
    assert leaves == [logits.hidden, logits.weight, None, None, None]
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is HeadOutput
    assert (again.scale, again.soft_cap, again.vocab_size, again.built_dtype) == (
        1.0,
        2.0,
        5,
        torch.float32,
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_through_fsdp2_gradients_reach_hidden_states_and_head(lone_process_group, tied):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))  # the default would be a GPU, where there is one
    batch = tiny_batch([6, 3])
    expected = gradients(tiny_model(tied=tied), batch)
    model = tiny_model(tied=tied)
    use_linear_logits(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = gradients(model, batch)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.full_tensor(), expected[name], rtol=1e-6, atol=1e-6)
