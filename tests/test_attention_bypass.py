"""The gradient's paths: a tokenwise one ends where a token attended to others."""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers as tf
from families import FAMILIES, HIDDEN, VOCABULARY, make_host
from peft import LoraConfig, get_peft_model
from torch import nn
from training import CONTEXTS, SETTINGS, make_ids, make_model, make_trainer, read, trained_weights
from transformers import AutoModelForCausalLM

from locas_peft import SlotWriter, TestTimeTrainer, calibrate
from locas_peft.ttt import Anchor
from locas_peft.ttt.attention_bypass import bypassing, list_attention

SMALL = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2}
# Residual streams inside, or beside, what bears attention's name; one attention within another; ALiBi.
OTHERS: dict[str, tf.PretrainedConfig] = {
    "bert": tf.BertConfig(**SMALL, intermediate_size=24, max_position_embeddings=64, is_decoder=True),
    "bloom": tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, n_layer=2, n_head=2),
    "falcon": tf.FalconConfig(**SMALL),
    "gpt_neo": tf.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]
    ),
    "gptj": tf.GPTJConfig(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=2, n_positions=64, rotary_dim=4),
    "mpt": tf.MptConfig(vocab_size=VOCABULARY, d_model=HIDDEN, n_layers=2, n_heads=2, max_seq_len=64),
}


def make_plain(family: str) -> nn.Module:
    if family in FAMILIES:
        return make_host(family)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(OTHERS[family]).eval()


def measure_reach(model: nn.Module, position: int, context) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [T, V] and, for each token, how far the prediction at one position moves with its embedding, [T]."""
    embeddings = model.get_input_embeddings()(make_ids(12)[None]).detach().requires_grad_()
    with context:
        logits = model(inputs_embeds=embeddings, use_cache=False).logits[0]
        logits[position].log_softmax(dim=-1)[5].backward()
    return logits.detach(), embeddings.grad[0].abs().sum(dim=-1)


@pytest.mark.parametrize("family", [*(family for family in FAMILIES if "lfm2" not in family), *OTHERS])
def test_a_tokens_loss_reaches_that_token_alone(family):
    model = make_plain(family)
    whole, far = measure_reach(model, 9, contextlib.nullcontext())
    logits, near = measure_reach(model, 9, bypassing(list_attention(model)))
    assert torch.equal(logits, whole), "the forward pass is the same"
    assert (far[:10] > 0).all(), "through attention, a loss reaches what came before"
    assert near[9] > 0
    assert not near[:9].any()
    again, after = measure_reach(model, 9, contextlib.nullcontext())
    assert torch.equal(again, whole) and torch.equal(after, far), "the model is as it was"


def test_the_gradient_of_the_memory_is_that_of_each_tokens_own_path():
    # With the residual stream and the FFNs alone, token by token: a batch of one-token texts whose attention is what
    # it was in the text.
    model, ids = make_model(), make_ids(9)
    calibrate(model, [make_ids(32)[None]])
    for name, value in model.named_parameters():
        if "locas_down" in name:
            nn.init.normal_(value, std=0.1)
    layers = model.base_model.model.model.layers
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda m, a, output: outputs.append(output[0].detach()))
        for layer in layers
    ]
    with bypassing(list_attention(model)):
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    nn.functional.cross_entropy(logits, ids[1:]).backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert len(found) == 2 * 3 and all(gradient.any() for gradient in found.values())

    expected = {name: torch.zeros_like(value) for name, value in found.items()}
    for index in range(len(ids) - 1):
        hooks = [
            layer.self_attn.register_forward_hook(lambda m, a, output, one=one[:, index, None]: (one, *output[1:]))
            for layer, one in zip(layers, outputs, strict=True)
        ]
        logits = model(input_ids=ids[None, index : index + 1], use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        loss = nn.functional.cross_entropy(logits, ids[index + 1 : index + 2]) / (len(ids) - 1)
        parameters = [model.get_parameter(name) for name in found]
        for name, gradient in zip(found, torch.autograd.grad(loss, parameters), strict=True):
            expected[name] += gradient
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_reading_scores_the_same_and_learns_otherwise(context):
    ids, full, tokenwise = (
        make_ids(40),
        make_trainer(context=context),
        make_trainer(context=context, gradient="tokenwise"),
    )
    theirs, ours = read(full, ids), read(tokenwise, ids)
    assert ours[0] == theirs[0], "before anything is learned"
    assert ours[1:] != theirs[1:]
    expected = trained_weights(full.model)
    assert any((expected[name] != value).any() for name, value in trained_weights(tokenwise.model).items())
    assert not any(module._forward_pre_hooks for module in list_attention(tokenwise.model))


def test_a_reading_learns():
    nlls = read(make_trainer(gradient="tokenwise", context="cache"), make_ids(24).repeat(6))
    assert sum(nlls[-3:]) < 0.9 * sum(nlls[3:6])


@pytest.mark.parametrize("lowest", [0, 1])
def test_attention_is_in_no_graph(lowest):
    model = make_model(layers_to_transform=[lowest])
    trainer = TestTimeTrainer(model, **SETTINGS, gradient="tokenwise")
    kept: dict[str, bool] = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "o_proj", "mlp")):
            module.register_forward_hook(
                lambda m, a, output, name=name: kept.__setitem__(name, kept.get(name, False) or output.requires_grad)
            )
    read(trainer, make_ids(40))
    in_graph = {name.removeprefix("base_model.model.model.") for name, kept in kept.items() if kept}
    assert in_graph == {f"layers.{layer}.mlp" for layer in range(lowest, 2)}


def test_lora_in_attention_still_learns():
    model = get_peft_model(make_host("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_alpha=8))
    before = trained_weights(model)
    read(TestTimeTrainer(model, **SETTINGS, gradient="tokenwise"), make_ids(40))
    after = trained_weights(model)
    assert all((after[name] != value).any() for name, value in before.items() if "lora_B" in name)


def test_an_anchors_pull_takes_the_same_path(monkeypatch):
    trainer = make_trainer(gradient="tokenwise", anchor=Anchor(make_ids(12)[None], every=1))
    pull, reached = trainer._loop._pull_to_base, []

    def watched(batch) -> None:
        hooks = [
            module.register_forward_hook(lambda m, a, output: reached.append(output[0].requires_grad))
            for module in list_attention(trainer.model)
        ]
        pull(batch)
        for hook in hooks:
            hook.remove()

    monkeypatch.setattr(trainer._loop, "_pull_to_base", watched)
    read(trainer, make_ids(40))
    assert len(reached) == 5 * 2 * 2, "five pulls, each with and without the memory, two layers"
    assert not any(reached)


def test_a_written_slot_has_its_own_tokens_gradient():
    written = {}
    for gradient in ("full", "tokenwise"):
        model = make_model(family="gpt_neox", r=16, init_strategy="write")
        writer = SlotWriter(model, tokens="all")
        settings = SETTINGS | {"learning_rate": None, "context": "cache", "gradient": gradient}
        next(TestTimeTrainer(model, writer=writer, **settings).read(make_ids(9)))
        assert writer.taken == 7
        written[gradient] = torch.cat([value for name, value in model.named_parameters() if "locas_down" in name])
    # Of all layers together each token's value is epsilon long. The last token does not act on later ones.
    cosines = nn.functional.cosine_similarity(written["full"], written["tokenwise"], dim=0)[:7]
    assert cosines[6] > 0.99 and (cosines[:6] < 0.999).all()


@pytest.mark.parametrize(
    "config",
    [
        FAMILIES["lfm2"],  # convolutions
        tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=1, state_size=4),
        tf.CTRLConfig(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=2, dff=24),  # takes v, k, q
        tf.XLNetConfig(vocab_size=VOCABULARY, d_model=HIDDEN, n_layer=2, n_head=2, d_inner=24),  # adds the residual
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_would_not_be_tokenwise_are_refused(config):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError) as caught:
        TestTimeTrainer(model, **SETTINGS, gradient="tokenwise")
    assert str(caught.value) == (
        f"gradient must be 'full' for {type(model).__name__}, got 'tokenwise': its tokens interact outside the "
        "attention that would be left out"
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter.grad is not None for parameter in model.parameters())
