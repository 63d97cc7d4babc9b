from functools import partial

import pytest
import torch
import transformers as tf
from families import HIDDEN, VOCABULARY, logits, make_host, make_tokens, same, snapshot, teach
from peft import get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM, BitNetConfig, LlamaForCausalLM

from locas_peft import LocasConfig, calibrate
from locas_peft.slots import widen_base
from locas_peft.tuner import list_layers
from locas_peft.tuner.ffn import KNOWN_PARTS, FFNParts, HostFFN
from locas_peft.tuner.finding import find_ffns, to_parts


class OddFFN(nn.Module):
    """A gated FFN under names of its own."""

    def __init__(self, width=24):
        super().__init__()
        self.reader = nn.Linear(HIDDEN, width, bias=False)
        self.keeper = nn.Linear(HIDDEN, width, bias=False)
        self.writer = nn.Linear(width, HIDDEN, bias=False)
        self.nonlinearity = nn.GELU()

    def forward(self, hidden_states):
        return self.writer(
            self.nonlinearity(self.keeper(hidden_states)) * self.reader(hidden_states)
        )


ODD_PARTS = {"gate": "keeper", "up": "reader", "down": "writer", "activation": "nonlinearity"}


def make_odd_host():
    host = make_host("llama")
    for layer in host.model.layers:
        layer.mlp = OddFFN()
    return host


def test_unknown_names_are_named_by_the_user():
    host = make_odd_host()
    expected = logits(host)
    model = get_peft_model(host, LocasConfig(r=4, ffn_parts=ODD_PARTS))
    assert model.peft_config["default"].target_modules == {"mlp"}
    calibrate(model, [make_tokens()])
    assert torch.equal(logits(model), expected)


class OddLlama(LlamaForCausalLM):
    """A model of a class of its own, which transformers can build from its config."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OddFFN(config.intermediate_size)


def test_a_host_whose_parts_the_user_names_is_unloaded_merged_and_widened():
    config = LocasConfig(r=4, init_weights="random", ffn_parts=ODD_PARTS)
    model = get_peft_model(OddLlama(make_host("llama").config).eval(), config)
    teach(model)
    expected = logits(model)
    merged = model.merge_and_unload()
    assert merged.config.intermediate_size == 28
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)

    base = OddLlama(make_host("llama").config).eval()
    expected = logits(base)
    widen_base(base, 8, ODD_PARTS)
    assert base.config.intermediate_size == 32
    torch.testing.assert_close(logits(base), expected, rtol=0, atol=1e-5)


def test_a_family_from_outside_is_one_row(monkeypatch):
    # It shares the down projection's name with a two-layer family: the order of the rows does not matter.
    two_layer = FFNParts(up="reader", down="writer", activation="nonlinearity")
    monkeypatch.setitem(KNOWN_PARTS, "odd two-layer", two_layer)
    monkeypatch.setitem(KNOWN_PARTS, "odd", FFNParts(**ODD_PARTS))
    model = get_peft_model(make_odd_host(), LocasConfig(r=4))
    assert model.peft_config["default"].target_modules == {"mlp"}
    assert [layer.ffn.gated for layer in list_layers(model)] == [True, True]


def test_wrong_part_names_are_refused_by_one_random_token():
    swapped = {**ODD_PARTS, "gate": "reader", "up": "keeper"}
    message = r"computes something other than down\(act\(gate\) \* up\) of its parts"
    with pytest.raises(ValueError, match=message):
        get_peft_model(make_odd_host(), LocasConfig(r=4, ffn_parts=swapped))


def test_model_without_known_ffn_says_what_it_has():
    parts = r"self_attn \(LlamaAttention\), mlp \(OddFFN\), input_layernorm \(LlamaRMSNorm\)"
    message = f"has no FFN of a known structure; a layer of it has {parts}.*Set target_modules"
    with pytest.raises(ValueError, match=message):
        get_peft_model(make_odd_host(), LocasConfig(r=4))


@pytest.mark.parametrize(
    "parts",
    [
        {"up": "a"},
        {"down": "b"},
        {"up": "a", "gate_up": "c", "down": "b"},
        {"up": "a", "down": "b", "x": "y"},
    ],
)
def test_incomplete_part_names_are_refused(parts):
    with pytest.raises(ValueError, match="ffn_parts must name down and either up"):
        to_parts(parts)


def test_target_that_is_no_ffn_is_refused_before_anything_is_replaced():
    host = make_host("llama")
    modules = list(host.modules())
    message = r"layers.0.mlp.gate_proj \(Linear\), which is no FFN .*name FFNs \(found: 'mlp'\)"
    with pytest.raises(ValueError, match=message):
        get_peft_model(host, LocasConfig(r=4, target_modules=["gate_proj"]))
    assert list(host.modules()) == modules


class Tower(nn.Module):
    """A language model beside a vision tower whose FFN has the same name."""

    def __init__(self):
        super().__init__()
        self.vision_tower = nn.ModuleDict({"mlp": OddFFN()})
        self.language_model = make_host("llama")


def test_towers_of_other_modalities_get_no_memory():
    found = list(find_ffns(Tower()))
    assert found == ["language_model.model.layers.0.mlp", "language_model.model.layers.1.mlp"]


@pytest.mark.parametrize("layers", [[1], 1])
@pytest.mark.parametrize("pattern", [None, "layers"])
def test_layers_are_chosen_beside_a_tower_of_another_modality(layers, pattern):
    config = LocasConfig(r=4, layers_to_transform=layers, layers_pattern=pattern)
    tower = inject_adapter_in_model(config, Tower())
    assert [layer.name for layer in list_layers(tower)] == ["language_model.model.layers.1.mlp"]


def test_layers_that_a_model_beside_a_tower_lacks_are_refused():
    message = r"layers_to_transform must select a layer that has an FFN, got \[2\]: use indices"
    with pytest.raises(ValueError, match=message):
        inject_adapter_in_model(LocasConfig(r=4, layers_to_transform=[2]), Tower())


def test_verification_leaves_modes_and_the_global_generator_alone():
    host = make_host("gpt2").train()
    host.transformer.h[0].mlp.dropout.eval()
    state = torch.get_rng_state()
    for ffn in find_ffns(host).values():
        ffn.verify()
    assert torch.equal(torch.get_rng_state(), state)
    assert host.transformer.h[0].mlp.training and not host.transformer.h[0].mlp.dropout.training


@pytest.mark.parametrize("odd", [0, 1])
def test_each_ffn_that_gets_a_memory_is_verified_and_no_other(odd):
    """Also of one class, as in Gemma 3n, where the first layers keep the largest activations alone."""
    host = make_host("llama")
    mlp = host.model.layers[odd].mlp
    plain = mlp.act_fn
    mlp.forward = lambda states: mlp.down_proj(
        plain(mlp.gate_proj(states)) * mlp.up_proj(states) ** 2
    )
    before = snapshot(host)
    message = (
        rf"^model.layers.{odd}.mlp \(LlamaMLP\) computes something other than .* exclude_modules"
    )
    with pytest.raises(ValueError, match=message):
        get_peft_model(host, LocasConfig(r=4))
    assert same(host, before)
    model = get_peft_model(host, LocasConfig(r=4, exclude_modules=rf".*layers\.{odd}\.mlp"))
    assert [layer.name for layer in list_layers(model)] == [f"model.layers.{1 - odd}.mlp"]
    # A plain checkpoint would have neurons of zeros in the other one.
    teach(model)
    for widen in (model.merge_and_unload, lambda: widen_base(host, 2)):
        with pytest.raises(ValueError, match=message):
            widen()


class Packed(nn.Module):
    """A projection of 8-bit weights that PEFT does not know."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), False)
        self.scale = nn.Parameter(scale, False)
        self.bias = None

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.weight * self.scale)


def test_weights_that_peft_cannot_dequantise_are_measured():
    host = make_host("llama")
    plain = [ffn.mean_down_norm() for ffn in find_ffns(host).values()]
    for layer in host.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Packed(getattr(layer.mlp, name)))
    ffns = list(find_ffns(host).values())
    assert [ffn.mean_down_norm() for ffn in ffns] == pytest.approx(plain, rel=0.01)
    gate, up = ffns[0].gate_and_up_rows(torch.tensor([3, 1]))
    for rows, part in ((gate, "gate_proj"), (up, "up_proj")):
        packed = getattr(host.model.layers[0].mlp, part)
        assert torch.allclose(rows, (packed.weight * packed.scale)[[3, 1]], atol=1e-6)
    packed.forward = lambda inputs: 1 / 0
    with pytest.raises(
        ValueError, match="^the weight of a Packed cannot be read: load the base in "
    ):
        ffns[0].gate_and_up_rows(torch.tensor([3, 1]))


def test_host_ffn_names_what_is_missing():
    message = r"mlp \(OddFFN\) has no projection named up_proj, down_proj: it has reader"
    with pytest.raises(ValueError, match=message):
        HostFFN(OddFFN(), FFNParts(up="up_proj", down="down_proj"), "mlp")


def make_gpt2_with_norms():
    host = make_host("gpt2")
    for layer in host.base_model.h:
        layer.mlp.between = between = nn.LayerNorm(64)
        layer.mlp.c_proj.register_forward_pre_hook(lambda _, args, norm=between: norm(args[0]))
    return host


def make_bitnet():
    config = BitNetConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("make", "ffn"), [(make_gpt2_with_norms, "GPT2MLP"), (make_bitnet, "BitNetMLP")]
)
def test_an_ffn_with_a_norm_between_its_projections_gets_no_memory(make, ffn):
    """The norm's weight made it look like an FFN on a decoder layer, which was not compared."""
    host = make()
    modules = list(host.modules())
    with pytest.raises(ValueError, match=f"{ffn}.* computes something other than down") as raised:
        get_peft_model(host, LocasConfig(r=4))
    assert "\n" not in str(raised.value)
    assert list(host.modules()) == modules


def forward_pair(mlp, hidden_states):
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)))


class PairActivation(nn.Module):
    """An activation that takes the gate and the up rows, as in Inkling."""

    def forward(self, gate, up):
        return nn.functional.silu(gate) * up


@pytest.mark.parametrize("is_flat", [False, True])
def test_an_ffn_whose_parts_cannot_be_run_alone_gets_no_memory(is_flat):
    host = make_host("llama")
    for layer in host.model.layers:
        layer.mlp.act_fn = PairActivation()
        if is_flat:
            layer.mlp.scale = nn.LayerNorm(HIDDEN)
            layer.mlp.forward = partial(forward_pair, layer.mlp)
    with pytest.raises(ValueError, match="computes something other than down") as raised:
        get_peft_model(host, LocasConfig(r=4))
    assert "\n" not in str(raised.value)


def need_more_input(block):
    class Hashed(type(block)):
        def forward(self, hidden_states, input_ids=None):
            input_ids.reshape(-1)
            return super().forward(hidden_states)

    block.__class__ = Hashed


def take_pairs(block):
    block.experts.act_fn = PairActivation()
    block.experts._apply_gate = lambda pair: PairActivation()(*pair.chunk(2, dim=-1))


@pytest.mark.parametrize("change", [need_more_input, take_pairs])
def test_a_mixture_that_cannot_be_run_alone_is_named(change):
    host = make_host("qwen3_moe")
    for layer in host.model.layers:
        change(layer.mlp)
    with pytest.raises(ValueError, match="mixtures of experts of an unknown structure"):
        get_peft_model(host, LocasConfig(r=4))


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}


def make_idefics() -> tf.PreTrainedModel:
    text = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 1}
    perceiver = {"hidden_size": 16, "resampler_depth": 1, "resampler_n_heads": 2}
    perceiver |= {"resampler_head_dim": 8, "num_key_value_heads": 1, "resampler_n_latents": 2}
    config = tf.Idefics2Config(
        text_config=tf.MistralConfig(vocab_size=VOCABULARY, pad_token_id=0, **text),
        vision_config=IMAGE,
        perceiver_config=perceiver,
        image_token_id=VOCABULARY - 1,
    )
    return tf.Idefics2ForConditionalGeneration(config)


def make_trocr() -> tf.PreTrainedModel:
    text = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2}
    text |= {"decoder_ffn_dim": 24, "max_position_embeddings": 64}
    config = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        tf.ViTConfig(**IMAGE),
        tf.TrOCRConfig(vocab_size=VOCABULARY, cross_attention_hidden_size=16, **text),
    )
    return tf.VisionEncoderDecoderModel(config=config)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (make_idefics, ["model.text_model.layers.0.mlp", "model.text_model.layers.1.mlp"]),
        (make_trocr, ["decoder.model.decoder.layers.0.fc2", "decoder.model.decoder.layers.1.fc2"]),
    ],
)
def test_what_brings_images_to_a_language_model_gets_no_memory(make, names):
    assert list(find_ffns(make())) == names


def test_an_ffn_of_several_modules_is_named_as_what_it_lacks():
    model = tf.BertModel(tf.BertConfig(vocab_size=VOCABULARY, **SIZES))
    parts = {"up": "intermediate.dense", "down": "output.dense"}
    with pytest.raises(ValueError, match="ffn_parts as its own .intermediate.dense, output.dense"):
        get_peft_model(model, LocasConfig(r=4, ffn_parts=parts))


def test_distilbert_is_merged(tmp_path):
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
    model = tf.DistilBertModel(tf.DistilBertConfig(vocab_size=VOCABULARY, **sizes))
    parts = {"up": "lin1", "down": "lin2"}
    config = LocasConfig(r=4, init_weights="random", ffn_parts=parts)
    model = get_peft_model(model, config).eval()
    teach(model)
    ids = make_tokens()
    expected = model(input_ids=ids).last_hidden_state
    model.merge_and_unload().save_pretrained(tmp_path)
    merged = tf.DistilBertModel.from_pretrained(tmp_path)
    assert merged.config.hidden_dim == 28
    torch.testing.assert_close(merged(input_ids=ids).last_hidden_state, expected)
