"""A compiled study has the figures of a plain one, to rounding; so has transformers' compiled generation."""

import pytest
import torch
from compiling import COMPILES
from torch import _dynamo as dynamo
from transformers import CompileConfig

from locas_peft import text
from locas_peft.bases import load_base
from locas_peft.selfstudy import Exchange
from locas_peft.stages import Place, ReadSettings, attached, complete, read, study
from locas_settings import StudySettings

PAGE = "The old man built the house by the river. He carried a stone from the river to the hill."
GIVEN = [
    Exchange("Who built the house?", "The old man."),
    Exchange("What came from the river?", "A stone."),
    Exchange("Where did the old man carry it?", "He carried it to the hill above the river."),
]
pytestmark = COMPILES


def test_a_traced_study_has_the_same_figures(traced, caplog):
    base, tokenizer = load_base(device="cpu")
    settings = complete(
        StudySettings(method="locas-glu", r=4, passes=4, window=64, anchor=2.0), base
    )
    ids = text.tokenize(tokenizer, PAGE)
    losses = []
    for is_compiled in (False, True):
        steps = []
        study(
            base,
            tokenizer,
            ids,
            settings,
            exchanges=GIVEN,
            compiled=is_compiled,
            on_step=steps.append,
        )
        losses.append([step.loss_nats for step in steps])
    assert losses[0][0] > losses[0][-1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)
    # A batch of lessons, one with a pull, and the anchor's own text.
    assert 1 <= dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    assert "not compiled" not in caplog.text


def test_a_base_that_cannot_be_compiled_is_one_line(monkeypatch, caplog):
    base, tokenizer = load_base(device="cpu")
    monkeypatch.setattr(base, "is_quantized", True, raising=False)
    settings = complete(StudySettings(method="lora", r=4, passes=1, window=64, anchor=0.0))
    study(
        base,
        tokenizer,
        text.tokenize(tokenizer, PAGE),
        settings,
        exchanges=GIVEN,
        compiled=True,
    )
    messages = [record.message for record in caplog.records if "compiled" in record.message]
    assert messages == ["the model is not compiled: its layers are quantised"]


def test_generation_with_a_static_cache_and_a_compiled_forward_is_the_same(tmp_path):
    base, tokenizer = load_base(device="cpu")
    ids = text.tokenize(tokenizer, PAGE)
    settings = complete(ReadSettings(r=4, window=32, stride=16), base)
    read(base, ids, settings, Place(out=tmp_path / "memory"))
    with attached(base, settings, tmp_path / "memory") as model:
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        plain = model.generate(input_ids=ids[None], **options)
        config = CompileConfig(backend="aot_eager", mode=None)
        # transformers compiles on a GPU alone.
        config._compile_all_devices = True
        compiled = model.generate(
            input_ids=ids[None],
            cache_implementation="static",
            compile_config=config,
            **options,
        )
    assert dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(plain, compiled)
