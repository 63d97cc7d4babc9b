"""What works on which family of causal language models: write `docs/families.md`.

    python docs/families.py                  # all families of the installed transformers, about ten minutes on one core
    python docs/families.py llama gpt2       # some: print their rows

Each family gets a tiny, randomly initialised model of its default config with small sizes. A memory is added, calibrated,
filled with values, saved, loaded, merged, unmerged, exported as LoRA, and merged into a checkpoint that stock
transformers loads. Outputs are compared after each step.
"""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from locas_peft import LocasConfig, calibrate
from locas_peft.slots import to_lora, widen_base
from locas_peft.tuner import list_layers

PAGE = Path(__file__).with_name("families.md")
STEPS = ("adds", "saves, loads", "merges", "exports", "checkpoint")
LAYERS = 2
# By the fields' names in all configs of transformers.
SIZES = (
    (16,
        "hidden_size d_model n_embd dim embed_dim emb_dim word_embed_proj_dim d_embed embedding_size "
        "sliding_window attention_window window_size attention_window_size moe_intermediate_size "
        "expert_ffn_hidden_size lru_width attention_hidden_size lm_head_dim"
    ),
    (24,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size dff d_inner "
        "dim_ff feed_forward_size"
    ),
    (LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_blocks num_decoder_layers"
    ),
    (2,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "eos_token_id num_encoder_attention_heads num_decoder_attention_heads num_key_value_heads "
        "num_kv_heads index_n_heads num_experts_per_tok moe_topk moe_k num_experts_per_token top_k_experts "
        "linear_num_key_heads altup_num_inputs linear_num_value_heads conv_kernel mamba_d_conv n_mamba_heads"
    ),
    (8,
        "head_dim attention_head_size kv_channels d_kv global_head_dim swa_head_dim v_head_dim index_head_dim "
        "index_topk q_lora_rank kv_lora_rank o_lora_rank linear_key_head_dim linear_value_head_dim "
        "mamba_d_head hidden_size_per_layer_input mamba_head_dim mamba_headdim image_size"
    ),
    (64,
        "vocab_size max_position_embeddings n_positions n_ctx max_target_positions max_source_positions "
        "max_seq_len seq_length vocab_size_per_layer_input"
    ),
    (4,
        "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim qk_nope_head_dim "
        "rotary_dim laurel_rank state_size mamba_d_state d_state ssm_state_size mamba_dt_rank time_step_rank "
        "mamba_n_heads mamba_num_heads chunk_size mamba_chunk_size block_multiple_of patch_size"
    ),
    (20,
        "shared_expert_intermediate_size shared_intermediate_size"
    ),
    (1,
        "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group "
        "n_groups first_k_dense_replace mamba_n_groups mamba_ngroups bos_token_id decoder_start_token_id"
    ),
    (0,
        "num_kv_shared_layers pad_token_id"
    ),
)  # fmt: skip
SIZE_OF = {name: size for size, names in SIZES for name in names.split()}
# Fields that mean something else where they are not set.
OPTIONAL = [
    "head_dim",
    "num_key_value_heads",
    "n_inner",
    "lm_head_dim",
    "window_size",
    "sliding_window",
    "shared_intermediate_size",
    "q_lora_rank",
]
DESCRIPTIVE = ("model_type", "architectures", "transformers_version", "dtype", "_name_or_path")
# Fields that fit no rule, or that a family needs to be consistent at these sizes.
FIELDS: dict[str, dict[str, Any]] = {
    "axk1": {"head_dim": 4},
    "codegen": {"n_head": 4},
    "deepseek_v3": {"head_dim": 4},
    "falcon_h1": {"mamba_d_ssm": 32},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "mamba2": {"num_heads": 4},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "reformer": {"axial_pos_embds_dim": [8, 8], "axial_pos_shape": [8, 8]},
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"head_dim": 4},
    "zaya": {"num_experts_per_tok": 1},
}
IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


@dataclass
class Row:
    """What was found for one family."""

    family: str
    ffns: str = ""
    steps: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


class Fault(Exception):
    """A step gave a wrong result."""


# ---------------------------------------------------------------------------------------------- tiny models


def shrink(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with small sizes, in the configs inside it too."""
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in DESCRIPTIVE or name == "per_layer_config":
            continue
        if isinstance(value, dict) and "model_type" in value:
            small[name] = {**shrink(value), "model_type": value["model_type"]}
        elif isinstance(value, list) and len(value) > LAYERS:
            small[name] = shrink_list(name, value)
        elif name in SIZE_OF and may_be_set(name, value):
            small[name] = SIZE_OF[name]
        else:
            small[name] = value
    return small


def may_be_set(name: str, value: Any) -> bool:
    if value is None:
        return name not in OPTIONAL
    return isinstance(value, int) and not isinstance(value, bool)


def shrink_list(name: str, values: list) -> list:
    """Return a list with an entry for each layer for fewer layers: two different ones, if there are."""
    if name in SIZE_OF:
        return [SIZE_OF[name]] * LAYERS
    if not any(part in name for part in ("layer", "types", "block", "pattern")):
        return values
    first = values[0]
    others = [value for value in values if value != first]
    return [first, others[-1] if others else first]


def make_host(family: str) -> PreTrainedModel:
    """Return a tiny model of a family, the same weights at each call."""
    config_class = CONFIG_MAPPING[family]
    fields = shrink(config_class().to_dict())
    config = config_class(**{**fields, **FIELDS.get(family, {})})
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3)
    return model


@torch.no_grad()
def say(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


# ---------------------------------------------------------------------------------------------- the steps


def add_memory(family: str) -> PeftModel:
    """Add a memory, check that it changes nothing, calibrate it, and give it values."""
    host = make_host(family)
    expected = say(host)
    model = get_peft_model(host, LocasConfig(r=4)).eval()
    check("a fresh memory changes the output", torch.equal(say(model), expected))
    calibrate(model, [IDS])
    check("a calibrated memory changes the output", torch.equal(say(model), expected))
    generator = torch.Generator().manual_seed(1)
    for layer in list_layers(model):
        for weight in layer.weights("default")[-1:]:
            values = torch.randn(weight.shape, generator=generator)
            weight.data = values / values.norm(dim=0)
    check("a memory with values changes nothing", not torch.equal(say(model), expected))
    return model


def save_and_load(family: str, model: PeftModel, folder: Path) -> None:
    model.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(make_host(family), folder).eval()
    check("a loaded memory says something else", torch.equal(say(loaded), say(model)))


def merge_and_unmerge(family: str, model: PeftModel, folder: Path) -> None:
    expected = say(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.merge_adapter()
    check("a merged memory says something else", is_close(say(model), expected))
    model.unmerge_adapter()
    after = model.state_dict()
    is_same = all(torch.equal(before[name], after[name]) for name in before)
    check("unmerging leaves other bits", is_same and before.keys() == after.keys())


def export(family: str, model: PeftModel, folder: Path) -> None:
    config, tensors = to_lora(model)
    host = make_host(family)
    widen_base(host, 4)
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    check("the LoRA says something else", is_close(say(load_lora(host, folder)), say(model)))


def load_lora(host: PreTrainedModel, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(host, folder).eval()


def write_checkpoint(family: str, model: PeftModel, folder: Path) -> None:
    expected = say(model)
    merged = model.merge_and_unload()
    check("the merged model says something else", is_close(say(merged), expected))
    merged.save_pretrained(folder)
    loaded = type(merged).from_pretrained(folder, attn_implementation="eager").eval()
    check("the loaded checkpoint says something else", is_close(say(loaded), expected))


VERBS: dict[str, Callable[[str, PeftModel, Path], None]] = {
    "saves, loads": save_and_load,
    "merges": merge_and_unmerge,
    "exports": export,
    "checkpoint": write_checkpoint,
}


def check(problem: str, is_right: bool) -> None:
    if not is_right:
        raise Fault(problem)


def is_close(output: Tensor, expected: Tensor) -> bool:
    error = (output - expected).norm()
    return bool(error <= 1e-3 * expected.norm())


def try_family(family: str) -> Row:
    """Take all steps with one family."""
    row = Row(family)
    try:
        say(make_host(family))
    except Exception as error:
        row.reasons.append(f"not tried, no tiny model: {describe(error)}")
        return row
    model = take_step(row, "adds", partial(add_memory, family))
    if model is None:
        return row
    layers = list_layers(model)
    kind = "gated" if layers[0].ffn.gated else "two-layer"
    has_mixture = any(layer.ffn.parts is None for layer in layers)
    mixture = "mixture, " if has_mixture else ""
    row.ffns = f"{mixture}{kind}"
    for name, verb in VERBS.items():
        with tempfile.TemporaryDirectory() as folder:
            own = copy.deepcopy(model)
            take_step(row, name, partial(verb, family, own, Path(folder)))
    return row


def take_step(row: Row, name: str, act: Callable[[], Any]) -> Any:
    """Return what a step returns; note in the row whether it went right, or why not."""
    try:
        result = act()
    except ValueError as error:
        row.steps[name] = "no"
        add_reason(row, name, describe(error))
        return None
    except Exception as error:
        row.steps[name] = "FAULT"
        add_reason(row, name, f"FAULT: {describe(error)}")
        return None
    row.steps[name] = "yes"
    return result


def add_reason(row: Row, name: str, reason: str) -> None:
    if reason not in " ".join(row.reasons):
        row.reasons.append(f"{name}: {reason}")


def describe(error: Exception) -> str:
    first, _, _ = str(error).partition("\n")
    kind = "" if isinstance(error, ValueError | Fault) else f"{type(error).__name__}: "
    return f"{kind}{first}"[:300]


# ---------------------------------------------------------------------------------------------- the page


# A part of an error, and what the page says for it.
REASONS = {
    "has no FFN of a known structure": "no FFN of a known structure",
    "mixtures of experts of an unknown structure": "experts of an unknown structure",
    "computes something other than": "the FFN computes something else than its parts say",
    "do not add up to a constant": "routing weights that do not add up to a constant",
    "beside a mixture of experts cannot be exported": "a mixture of experts has no LoRA",
    "no field of": "no field of the config holds the new width",
    "not tried, no tiny model": "no tiny model could be made",
}


def write_page(rows: Iterable[Row]) -> str:
    """Return the page: a line for all families that have the same FFN, steps and reasons."""
    rows = list(rows)
    tried = [row for row in rows if row.steps]
    added = [row for row in tried if row.steps["adds"] == "yes"]
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft", "torch")
    )
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(describe_group(row), []).append(row.family)
    lines = [
        "# Families of models",
        "",
        f"`python docs/families.py` writes this page ({versions}). It makes a tiny model of each",
        "family of `AutoModelForCausalLM`, with random weights, and compares its outputs after each step.",
        f"Of {len(rows)} families {len(tried)} were tried, and {len(added)} can have a memory.",
        "",
        "- **adds**: a fresh memory changes no output; with values it does.",
        "- **saves, loads**, **merges**, **exports**: a saved, merged or exported memory gives the same outputs.",
        "- **checkpoint**: stock transformers loads the merged model.",
        "",
        "`get_peft_model` also takes models of other classes (tested: T5, and a language model with a vision tower). `TestTimeTrainer` and the commands take",
        "causal language models alone. A step that does not work ends with an error before anything changes. [`ffn_parts`](howto/ffn.md) names the parts of",
        "an FFN that is not found.",
        "",
        "A tiny default config leaves out what a released checkpoint may have. Falcon-H1 with multipliers in its FFNs cannot have a memory. In Gemma 3n",
        "the layers whose activations are sparse cannot: leave them out with `exclude_modules`. In Gemma 4 with experts the dense FFNs can:",
        '`target_modules=["mlp"]`.',
        "",
        "| FFN | works | families |",
        "|---|---|---|",
    ]
    for group, families in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {' | '.join(group)} | {', '.join(families)} |")
    return "\n".join(lines) + "\n"


def describe_group(row: Row) -> tuple[str, str]:
    """Return the first cells of a row of the page: the FFN, and which steps work, or why not."""
    text = "; ".join(row.reasons)
    reasons = [reason for part, reason in REASONS.items() if part in text]
    failed = [step for step in STEPS if row.steps.get(step) != "yes"]
    if "FAULT" in row.steps.values() or (text and not reasons):
        reasons = [escape(text)]
    if not failed:
        return (row.ffns, "all")
    works = f"all but {', '.join(failed)}"
    if "adds" in failed:
        works = "none" if row.steps else "not tried"
    return (row.ffns, f"{works}: {'; '.join(reasons)}")


def escape(text: str) -> str:
    for character in "*_<[|":
        text = text.replace(character, f"\\{character}")
    return text


def main(families: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    rows = []
    for family in families or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        row = try_family(family)
        rows.append(row)
        print(family, row.ffns, *row.steps.values(), *row.reasons, sep=" | ", flush=True)
    if not families:
        PAGE.write_text(write_page(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
