"""A memory beside a mixture of experts: what `test_families.py` does not say of it."""

import pytest
import torch
from families import FAMILIES, MIXTURES, make_host, make_tokens, same, snapshot
from peft import get_peft_model
from test_families import R, learn, logits, make_memory
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from locas_peft import LocasConfig, to_lora, widen_base
from locas_peft.tuner import find_ffns
from locas_peft.tuner.mixture import HostMixture


def mixtures_of(host: torch.nn.Module) -> list[HostMixture]:
    return [ffn for ffn in find_ffns(host).values() if isinstance(ffn, HostMixture)]


@torch.no_grad()
@pytest.mark.parametrize("family", MIXTURES)
def test_topk_clones_the_neurons_that_are_most_active_by_their_routing(family):
    host, given = make_host(family), {}
    blocks = mixtures_of(host)
    for block in blocks:
        block.experts.register_forward_pre_hook(
            lambda module, args, name=block.name: given.update({name: args})
        )
    logits(host)
    slots = make_memory(family).peft_config["default"].get_record("slots")
    for block in blocks:
        inputs, chosen, weights = given[block.name]
        activity = torch.zeros(block.slots)
        for token, experts, shares in zip(inputs, chosen, weights, strict=True):
            for expert, share in zip(experts, shares, strict=True):
                gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
                activity[expert * block.expert_width :][: block.expert_width] += (
                    share * block.act(gate) * up
                ).abs()
            if block.shared is not None:
                owner = block.shared.owner
                active = block.act(owner.gate_proj(token)) * owner.up_proj(token)
                if hasattr(block.owner, "shared_expert_gate"):
                    active = active * torch.sigmoid(block.owner.shared_expert_gate(token))
                activity[-block.shared.width :] += active.abs()
        assert slots[block.name] == activity.topk(R).indices.tolist()


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("mixtral", {"intermediate_size": 24 + 8}),  # R = 4, and four neurons of zeros
        ("qwen3_moe", {"intermediate_size": 24, "moe_intermediate_size": 16 + 8}),
        ("qwen2_moe", {"moe_intermediate_size": 16 + 8, "shared_expert_intermediate_size": 20}),
        (
            "deepseek_v3",
            {"intermediate_size": 24 + 4, "moe_intermediate_size": 16, "n_shared_experts": 3},
        ),
    ],
)
def test_config_of_the_merged_checkpoint(family, expected):
    model = make_memory(family)
    learn(model)
    config = model.merge_and_unload().config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_two_merged_memories_are_removed_and_one_is_merged_again(family):
    model = make_memory(family)
    learn(model)
    model.add_adapter("second", LocasConfig(r=3, init_weights="gaussian", scaling=500.0))
    model.set_adapter("second")
    learn(model)
    expected = logits(model)
    model.merge_adapter(["default", "second"])
    model.unmerge_adapter()
    model.merge_adapter(["second"])
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    assert torch.equal(logits(model.unload()), logits(make_host(family)))


@pytest.mark.parametrize(
    ("family", "constant"), [("mixtral", 1.0), ("lfm2_moe", 1.5), ("deepseek_v3", 2.5)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_of_the_routing_weights_is_measured(family, constant, dtype):
    sums = torch.tensor([block.routing_sum() for block in mixtures_of(make_host(family, dtype))])
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(sums, torch.full_like(sums, constant), rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("qwen3_moe", "it has no shared expert"), ("qwen2_moe", "its shared expert is gated")],
)
def test_merging_is_refused_where_it_would_not_be_exact(family, reason, monkeypatch):
    monkeypatch.setattr(FAMILIES[family], "norm_topk_prob", False)
    model = make_memory(family)
    learn(model)
    before = snapshot(model)
    message = (
        "^cannot merge into model.layers.0.mlp: the routing weights of its experts do not add up "
        f"to a constant, and {reason}: keep the memory as an adapter.$"
    )
    with pytest.raises(ValueError, match=message):
        model.merge_and_unload()
    assert same(model, before)


def test_experts_of_an_unknown_structure_are_named():
    host = make_host("llama")
    host.model.layers[1].mlp = torch.nn.ModuleDict({"experts": torch.nn.ModuleList()})
    message = (
        r"^LlamaForCausalLM has mixtures of experts of an unknown structure "
        r"\(model.layers.1.mlp.experts and 0 more\): set target_modules to FFNs that get a memory "
        r"\(found: 'model.layers.0.mlp'\)\.$"
    )
    with pytest.raises(ValueError, match=message):
        get_peft_model(host, LocasConfig(r=4))
    model = get_peft_model(host, LocasConfig(r=4, target_modules=["model.layers.0.mlp"]))
    assert model.base_model.targeted_module_names == ["model.layers.0.mlp"]


def test_a_block_that_is_no_sum_of_its_experts_is_left_out():
    host = make_host("mixtral")
    block = type(host.model.layers[0].mlp)
    doubled = type(
        "Doubled", (block,), {"forward": lambda self, states: 2 * block.forward(self, states)}
    )
    host.model.layers[1].mlp.__class__ = doubled
    assert list(find_ffns(host)) == ["model.layers.0.mlp"]


def test_a_dense_ffn_beside_such_experts_can_have_a_memory():
    """In a layer of Gemma 4 the experts and the FFN are parts of the layer itself."""
    config = Gemma4TextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=16,
        hidden_size_per_layer_input=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=8,
        intermediate_size=24,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=8,
    )
    host = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"experts of an unknown structure .* \(found: 'mlp'\)\.$"):
        get_peft_model(host, LocasConfig(r=4))
    model = get_peft_model(host, LocasConfig(r=4, target_modules=["mlp"]))
    assert model.base_model.targeted_module_names == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_padding_does_not_count():
    tokens, mask = make_tokens(), torch.ones(4, 32, dtype=torch.long)
    mask[:, 24:] = 0
    counted = []
    for inputs in ({"input_ids": tokens, "attention_mask": mask}, {"input_ids": tokens[:, :24]}):
        model = get_peft_model(make_host("qwen2_moe"), LocasConfig(r=R)).train()
        model(**inputs)
        counted.append(model.peft_config["default"].get_record("slots"))
    assert counted[0] == counted[1]


def test_a_mixture_is_no_lora():
    reason = "a memory beside a mixture of experts cannot be exported as LoRA, got model.layers.0.mlp: merge it"
    with pytest.raises(ValueError, match=reason):
        to_lora(make_memory("mixtral"))
    with pytest.raises(ValueError, match=reason):
        widen_base(make_host("mixtral"), 4)
