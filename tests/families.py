"""One tiny, randomly initialised host a family of architectures: the case list that drives the tuner's tests."""

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import transformers as tf
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from locas_peft import LocasConfig, LocasLayer
from locas_peft.tuner import list_layers

VOCABULARY = 64
HIDDEN = 16
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 1, "intermediate_size": 24}
_WHOLE = {**_COMMON, "intermediate_size": 24}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}

FAMILIES: dict[str, tf.PretrainedConfig] = {
    # gated: gate, up, down
    "llama": tf.LlamaConfig(**_GROUPED),
    "llama with biases": tf.LlamaConfig(**_GROUPED, mlp_bias=True),
    "mistral": tf.MistralConfig(**_GROUPED),
    "qwen2": tf.Qwen2Config(**_GROUPED),
    "qwen3": tf.Qwen3Config(**_GROUPED, head_dim=8),
    "gemma": tf.GemmaConfig(**_GROUPED, head_dim=8),
    "gemma2": tf.Gemma2Config(**_GROUPED, head_dim=8),
    "gemma3": tf.Gemma3TextConfig(**_GROUPED, head_dim=8),
    "olmo": tf.OlmoConfig(**_GROUPED),
    "olmo2": tf.Olmo2Config(**_GROUPED),
    "granite": tf.GraniteConfig(**_GROUPED),
    "smollm3": tf.SmolLM3Config(**_GROUPED),
    # gated, gate and up in one projection
    "phi3": tf.Phi3Config(**_GROUPED),
    "glm4": tf.Glm4Config(**_GROUPED, head_dim=8),
    # gated, w1, w3, w2; the width derived from intermediate_size
    "lfm2": tf.Lfm2Config(**_GROUPED, block_multiple_of=4, layer_types=["conv", "full_attention"]),
    # two layers, transposed Conv1D
    "gpt2": tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=2, n_positions=64
    ),
    # two layers, biases
    "gpt_neox": tf.GPTNeoXConfig(**_WHOLE),
    "phi": tf.PhiConfig(**_WHOLE),
    "starcoder2": tf.Starcoder2Config(**_GROUPED),
    "nemotron": tf.NemotronConfig(**_GROUPED, head_dim=8),
    "gptj": tf.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=2, n_positions=64, rotary_dim=4
    ),
    # two layers, flat on the decoder layer
    "opt": tf.OPTConfig(**_COMMON, ffn_dim=24, word_embed_proj_dim=HIDDEN),
    "opt with norms after": tf.OPTConfig(
        **_COMMON, ffn_dim=24, word_embed_proj_dim=HIDDEN, do_layer_norm_before=False
    ),
}
MIXTURES: dict[str, tf.PretrainedConfig] = {
    # routing weights that add up to 1
    "mixtral": tf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": tf.Qwen3MoeConfig(**_GROUPED, head_dim=8, **_EXPERTS, num_experts=4, norm_topk_prob=True),
    "granitemoe": tf.GraniteMoeConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    # and a gated shared expert
    "qwen2_moe": tf.Qwen2MoeConfig(
        **_GROUPED, **_EXPERTS, num_experts=4, norm_topk_prob=True, shared_expert_intermediate_size=20
    ),
    # routing weights that add up to 1.5
    "lfm2_moe": tf.Lfm2MoeConfig(
        **_GROUPED, **_EXPERTS, num_experts=4, num_dense_layers=0, layer_types=["conv", "full_attention"],
        routed_scaling_factor=1.5,
    ),
    # a shared expert that is always on, as wide as two experts, and a dense first layer
    "deepseek_v3": tf.DeepseekV3Config(
        **_WHOLE, **_EXPERTS, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1,
        n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        routed_scaling_factor=2.5,
    ),
}  # fmt: skip
FAMILIES |= MIXTURES
# One of each structure of an FFN.
ONE_OF_EACH = ("llama", "phi3", "lfm2", "gpt2", "gpt_neox", "opt", "qwen2_moe", "deepseek_v3")
GATED = (
    set(MIXTURES) | {"phi3", "glm4", "lfm2"} | set(list(FAMILIES)[: list(FAMILIES).index("phi3")])
)


def each_family(families: Iterable[str] = FAMILIES) -> list:
    """The families as parameters of a test: one of each structure is fast, the others are slow."""
    return [
        pytest.param(name, id=name, marks=() if name in ONE_OF_EACH else pytest.mark.slow)
        for name in families
    ]


def make_host(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A host in evaluation mode, the same weights at each call, large enough that its FFNs matter."""
    torch.manual_seed(0)
    # A copy: merging writes the new width into the config.
    config = copy.deepcopy(FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(5)
    return model.to(dtype).eval()


def make_tokens(batch: int = 4, length: int = 32, seed: int = 1) -> torch.Tensor:
    """`LongTensor [B, T]` of tokens that are no special ones."""
    return torch.randint(
        3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def weights_in(layer: LocasLayer, name: str = "default") -> list[torch.Tensor]:
    """A memory's gate and up `[R, D]` (no gate in a two-layer memory) and down `[D, R]` in one layer."""
    return [projection.weight for projection in layer.projections(name)]


def make_model(family: str = "llama", name: str = "default", **kwargs) -> PeftModel:
    """A model with one memory that says something else than the base."""
    config = LocasConfig(**{"r": 4, "init_weights": "random", **kwargs})
    model = get_peft_model(make_host(family), config, adapter_name=name)
    teach(model, name)
    return model


def teach(model: torch.nn.Module, name: str = "default", seed: int = 0) -> None:
    """Give a memory values, as if it had learned."""
    generator = torch.Generator().manual_seed(seed)
    for layer in list_layers(model, name):
        weight = layer.locas_down[name].weight
        values = torch.randn(weight.shape, generator=generator)
        # Inside the ball of the norm clip.
        weight.data = (values / values.norm(dim=0)).to(weight)
        layer.locas_input_scale[name] = torch.tensor(1.0 + seed / 4)
        layer.locas_tau[name] = torch.tensor(4.0)
        layer.locas_calibrated[name] = torch.tensor(1.0)


@torch.no_grad()
def logits(model: torch.nn.Module, tokens: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
    return model(input_ids=make_tokens() if tokens is None else tokens, **kwargs).logits


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(
        torch.equal(after[name], before[name]) for name in before
    )


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a memory's file; the new file has no digest."""
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def change_config(folder: Path, **fields) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
