"""torch.compile: no graph break in a memory's forward and the same outputs; a new memory in place of the old one."""

import pytest
import torch
from compiling import COMPILES
from families import logits, make_host, make_model, make_tokens, teach
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import load_peft_weights
from torch import _dynamo as dynamo

from locas_peft import LocasConfig
from locas_peft.tuner import list_layers

# As the embedded backbone.
FAMILY = "qwen3"
IDS = make_tokens(1, 24)
pytestmark = COMPILES


@pytest.fixture(scope="module")
def memories(tmp_path_factory):
    """Two memories of one width that change the output."""
    folders = []
    for seed in (0, 1):
        model = make_model(FAMILY, seed=seed)
        teach(model, seed=seed)
        folders.append(tmp_path_factory.mktemp("memory"))
        model.save_pretrained(folders[-1])
    return folders


def load(folder, **options) -> PeftModel:
    return PeftModel.from_pretrained(make_host(FAMILY), folder, **options)


def count_breaks(model, *arguments, **options) -> tuple[int, list[str]]:
    found = dynamo.explain(model)(*arguments, **options)
    return found.graph_break_count, [str(each.reason) for each in found.break_reasons]


def test_the_forward_of_a_layer_has_no_graph_break(memories):
    (layer, *_), hidden = list_layers(load(memories[0], is_trainable=True)), torch.randn(1, 8, 16)
    layer.train()(hidden)
    assert count_breaks(layer, hidden) == (0, [])
    dynamo.reset()
    assert count_breaks(layer.eval(), hidden) == (0, [])


@pytest.mark.parametrize("family", [FAMILY, "opt"])
def test_a_compiled_model_takes_the_memories_of_each_batch(family, fresh_graphs):
    model = make_model(family).eval()
    model.add_adapter("other", LocasConfig(r=4, init_weights="random"))
    teach(model, "other", seed=1)
    compiled = torch.compile(model, backend="eager")
    for names in (["default", "other", "__base__"], ["other", "__base__", "default"], None):
        rows = {"input_ids": make_tokens(3), "adapter_names": names}
        with torch.no_grad():
            expected = model(**rows).logits
            torch.testing.assert_close(compiled(**rows).logits, expected)


@pytest.mark.parametrize("family", [FAMILY, "gpt_neox"])
def test_an_exported_graph_is_the_model_with_its_memory(family):
    model = make_model(family).eval()
    options = {"input_ids": IDS, "use_cache": False, "return_dict": False}
    with torch.enable_grad():
        exported = torch.export.export(model, (), options, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(**options)[0], model(**options)[0])


def test_a_flat_ffn_is_compiled_in_whole_and_in_parts(fresh_graphs):
    model = make_model("opt")
    expected = logits(model, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, use_cache=False), expected)
    dynamo.reset()
    for layer in list_layers(model):
        # The first projection is compiled, what follows is not.
        layer.forward = torch.compiler.disable(layer.forward)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, use_cache=False), expected)


@pytest.mark.slow
def test_reading_has_no_graph_break(memories):
    """The first forward in training mode asks the weights whether the memory is calibrated; later ones do not."""
    model = load(memories[0], is_trainable=True).train()
    model(IDS, use_cache=False)
    assert count_breaks(model, IDS, use_cache=False) == (0, [])
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(
        IDS, labels=IDS, use_cache=False
    ).loss
    loss.backward()
    compiled = [layer.locas_down["default"].weight.grad.clone() for layer in list_layers(model)]
    model.zero_grad()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    for layer, gradient in zip(list_layers(model), compiled, strict=True):
        torch.testing.assert_close(
            gradient, layer.locas_down["default"].weight.grad, rtol=1e-4, atol=1e-6
        )


@pytest.mark.slow
def test_answering_has_no_graph_break(memories):
    model = load(memories[0]).eval()

    def read() -> dict:
        return {
            "past_key_values": model(IDS[:, :-1], use_cache=True).past_key_values,
            "use_cache": True,
        }

    with torch.no_grad():
        assert count_breaks(model, IDS[:, -1:], **read()) == (0, [])
        step = torch.compile(model, backend="aot_eager", fullgraph=True)(
            IDS[:, -1:], **read()
        ).logits[:, -1]
    torch.testing.assert_close(step, logits(model, IDS)[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_a_disabled_or_merged_memory_has_no_graph_break(memories, merged):
    model = load(memories[0]).eval()
    model.merge_adapter() if merged else model.base_model.disable_adapter_layers()
    with torch.no_grad():
        assert count_breaks(model, IDS, use_cache=False) == (0, [])


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_memory_of_the_same_width_takes_the_place_of_another(memories, compiles):
    """PEFT has `hotswap_adapter` for LoRA alone; its general functions swap a memory."""
    expected = [logits(load(folder).eval()) for folder in memories]
    model = load(memories[0]).eval()
    modules, graphs = list(model.modules()), set()
    compiled = torch.compile(model, backend="eager")
    for number in (0, 1, 0):
        set_peft_model_state_dict(model, load_peft_weights(memories[number], device="cpu"))
        torch.testing.assert_close(logits(model), expected[number], rtol=0, atol=0)
        if compiles:
            found = logits(compiled, use_cache=False)
            torch.testing.assert_close(found, expected[number], rtol=1e-4, atol=1e-4)
        graphs.add(dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(graphs) == 1, "compiled again"
    assert list(model.modules()) == modules


def test_a_memory_of_another_width_does_not_take_its_place(memories):
    model = load(memories[1]).eval()
    before = logits(model)
    narrow = get_peft_model_state_dict(make_model(FAMILY, r=2))
    with pytest.raises((RuntimeError, ValueError), match="size mismatch|shape"):
        set_peft_model_state_dict(model, narrow)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
