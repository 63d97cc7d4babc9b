"""PEFT's own tests, run for `LocasConfig`.

    pytest tests/test_peft_suite.py                         # five families, about half a minute
    pytest tests/test_peft_suite.py -m "slow or not slow"   # all families of families.py
    pytest tests/test_peft_suite.py -rs                     # also lists what does not apply, and why

PEFT runs most of its tests over a matrix: model x config class x config arguments. This module takes those tests
from PEFT's source distribution (the wheel has none), keeps their bodies, and replaces the matrix by ours: small,
randomly initialised models of five families, made here and read from disk, so that nothing touches the hub.

- Where the tests come from: the folder named by `PEFT_TESTS`; else the source distribution of the installed version,
  fetched once with pip into pytest's cache. Without either, the whole module skips and says so.
- What runs: every test whose matrix names a config class. A test that does not apply is listed in `NOT_APPLICABLE`
  with its reason. A test that is in neither list fails, and so does one that PEFT's own code skips for a reason that
  is not listed: nothing is left out without a word.
- With what: `init_weights="random"`, which is ready at creation, for everything, and the default `topk`, which
  looks at text first, on a few families. No test is expected to fail.
- Tests that build PEFT's own toy models by name (`MLP()`, `DeepMLP()`) get a toy model whose `lin0` is an FFN.
"""

import contextlib
import copy
import functools
import importlib.util
import inspect
import os
import subprocess
import sys
import tarfile
import tempfile
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import peft
import pytest
import torch
import transformers
from families import FAMILIES
from torch import nn
from transformers.pytorch_utils import Conv1D

from locas_peft import LocasConfig
from locas_peft.tuner.norm_clip import NormClip

pytestmark = pytest.mark.filterwarnings("default")


# --------------------------------------------------------------------------------------------------------------------
# PEFT's tests


def find_peft_tests() -> Path:
    """Returns the tests folder of PEFT's source distribution; raises RuntimeError where there is none to be had."""
    if "PEFT_TESTS" in os.environ:
        folder = Path(os.environ["PEFT_TESTS"])
        if not (folder / "testing_common.py").is_file():
            raise RuntimeError(f"PEFT_TESTS={folder} has no testing_common.py")
        return folder
    cache = (
        Path(__file__).resolve().parent.parent
        / ".pytest_cache"
        / "d"
        / f"peft-{peft.__version__}-tests"
    )
    if not cache.is_dir():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary",
                "peft",
            ]
            command += [
                "--retries",
                "1",
                "--timeout",
                "20",
                "--dest",
                scratch,
                f"peft=={peft.__version__}",
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            archives = list(Path(scratch).glob("peft-*.tar.gz"))
            if not archives:
                last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise RuntimeError(f"pip could not fetch them ({last_line})")
            unpacked = Path(scratch, "tests")
            unpacked.mkdir()
            with tarfile.open(archives[0]) as archive:
                for member in archive:
                    if member.isfile() and Path(member.name).parts[1:-1] == ("tests",):
                        (unpacked / Path(member.name).name).write_bytes(
                            archive.extractfile(member).read()
                        )
            with contextlib.suppress(OSError):  # another worker was faster
                unpacked.rename(cache)
    return cache


def import_peft_tests(folder: Path, *names: str) -> list[types.ModuleType]:
    """Imports modules of PEFT's tests as one package (they import each other relatively)."""
    pytest.register_assert_rewrite("peft_own_tests")
    package = sys.modules["peft_own_tests"] = types.ModuleType("peft_own_tests")
    package.__path__ = [str(folder)]
    # What the modules import for tests that are not run here, where it is not installed.
    absent = {
        name: types.ModuleType(name)
        for name in ("datasets", "diffusers")
        if not importlib.util.find_spec(name)
    }
    for name, attribute in {
        "datasets": "load_dataset",
        "diffusers": "StableDiffusionPipeline",
    }.items():
        if name in absent:
            setattr(absent[name], attribute, type(attribute, (), {}))
    sys.modules.update(absent)
    vars(pytest.mark)["skipf"] = (
        pytest.mark.skipif
    )  # so spelled in `test_low_level_api.py`; refused by --strict-markers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    finally:
        for name in absent:
            del sys.modules[name]


try:
    peft_tests = find_peft_tests()
except RuntimeError as error:
    pytest.skip(
        f"needs PEFT's own tests: {error}. Set PEFT_TESTS to their folder.", allow_module_level=True
    )
common, utils, decoder, custom, config_tests, seq_classifier, features, token_qa, *further = (
    import_peft_tests(
        peft_tests,
        "testing_common",
        "testing_utils",
        "test_decoder_models",
        "test_custom_models",
        "test_config",
        "test_seq_classifier",
        "test_feature_extraction_models",
        "test_token_classification_qa",
        "test_hub_features",
        "test_low_level_api",
        "test_other",
        "test_trainable_tokens",
    )
)


# --------------------------------------------------------------------------------------------------------------------
# The models

FIVE = (
    "qwen3",
    "llama",
    "gpt2",
    "phi3",
    "opt",
)  # one a structure of FFN, and two of the gated ones
OTHERS = tuple(family for family in FAMILIES if family not in FIVE)
HEADS = {
    "lm": transformers.AutoModelForCausalLM,
    "cls": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
    "qa": transformers.AutoModelForQuestionAnswering,
    "base": transformers.AutoModel,
}
_folder = tempfile.TemporaryDirectory(prefix="peft-suite-")


def model_folder(family: str, head: str) -> str:
    """Where a test finds its model; `make_model` puts it there.

    Families are numbered: PEFT's tests skip methods by what they read in a model's name ("llama", "gpt2", ...).
    """
    return str(Path(_folder.name, head, str(list(FAMILIES).index(family))))


def make_model(folder: str) -> None:
    """Saves a small model with random weights in a folder of `model_folder`, where there is none yet."""
    if not Path(folder).is_dir():
        config = copy.deepcopy(list(FAMILIES.values())[int(Path(folder).name)])
        torch.manual_seed(0)
        model = HEADS[Path(folder).parent.name].from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5 if parameter.dim() >= 2 else 1)  # so that its FFNs matter
        model.save_pretrained(folder)


@pytest.fixture(scope="session")
def lora_folder(tmp_path_factory) -> str:
    """An adapter of another method, in place of the one that PEFT's config tests read from the hub."""
    folder = tmp_path_factory.mktemp("lora")
    peft.LoraConfig(r=8, target_modules=["q_proj"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def offline(request, monkeypatch, lora_folder):
    """Makes the model that a test asks for, and keeps the test off the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(config_tests, "PEFT_MODELS_TO_TEST", [(lora_folder, "main")])
    callspec = getattr(request.node, "callspec", None)
    model_id = callspec.params.get("model_id") if callspec else None
    if callspec and "model_cls_and_id" in callspec.params:
        model_id = callspec.params["model_cls_and_id"][1]
    if model_id is not None:
        monkeypatch.setitem(
            utils._HUB_MODEL_ACCESSES, model_id, 0
        )  # "already fetched": patched to stay offline
        if model_id.startswith(_folder.name):
            make_model(model_id)


class GatedFFN(nn.Module):
    """An FFN of the Llama kind."""

    def __init__(self, size: int = 10, width: int = 24, bias: bool = True):
        super().__init__()
        self.gate_proj = nn.Linear(size, width, bias=False)
        self.up_proj = nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PlainFFN(nn.Module):
    """An FFN of the GPT-NeoX kind: two layers with biases."""

    def __init__(self, size: int = 10, width: int = 24, bias: bool = True):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(size, width, bias=bias)
        self.dense_4h_to_h = nn.Linear(width, size, bias=bias)
        self.act = nn.GELU()

    def forward(self, x):
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class Conv1DFFN(nn.Module):
    """An FFN of the GPT-2 kind: two layers, transposed."""

    def __init__(self, size: int = 10, width: int = 24, bias: bool = True):
        super().__init__()
        self.c_fc = Conv1D(width, size)
        self.c_proj = Conv1D(size, width)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class Toy(nn.Module):
    """In place of PEFT's `MLP`: the same input and output, `lin0` and `ffn1` are FFNs, `lin1` is a linear layer."""

    ffn = GatedFFN

    def __init__(self, bias: bool = True):
        super().__init__()
        self.stem = self.make_stem(bias)
        self.norm0 = nn.LayerNorm(10)
        self.lin0 = self.ffn(bias=bias)
        self.norm1 = nn.LayerNorm(10)
        self.ffn1 = self.ffn(bias=bias)
        self.lin1 = nn.Linear(10, 2, bias=bias)
        self.sm = nn.LogSoftmax(dim=-1)
        self.dtype = torch.float

    def make_stem(self, bias: bool) -> nn.Module:
        return nn.Linear(10, 10, bias=bias)

    def read(self, x):
        return self.stem(x.to(self.dtype) / 90)

    def forward(self, X):
        x = self.read(X)
        x = x + self.lin0(self.norm0(x))
        x = x + self.ffn1(self.norm1(x))
        return self.sm(self.lin1(x))


class ToyPlain(Toy):
    ffn = PlainFFN


class ToyConv1D(Toy):
    ffn = Conv1DFFN


class ToyEmbedding(Toy):
    """A toy with an embedding, for `trainable_token_indices`."""

    def make_stem(self, bias: bool) -> nn.Module:
        self.emb = nn.Embedding(100, 10)
        return nn.Linear(100, 10, bias=bias)

    def read(self, x):
        return self.stem(self.emb(x.long()).flatten(1).to(self.dtype))


class DeepToy(nn.Module):
    """In place of PEFT's `DeepMLP`: `lin0` of each layer is an FFN. It is never run."""

    def __init__(self, size: int = 10):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(4):
            layer = nn.Module()
            layer.lin0 = GatedFFN(size, 64)
            layer.lin1 = nn.Linear(size, size)
            self.layers.append(layer)


TOYS = {"Toy": Toy, "ToyPlain": ToyPlain, "ToyConv1D": ToyConv1D, "ToyEmbedding": ToyEmbedding}


class ToyLoader:
    """In place of PEFT's `MockTransformerWrapper`."""

    @classmethod
    def from_pretrained(cls, model_id, dtype=None):
        torch.manual_seed(0)  # the same weights for every call
        return TOYS[model_id]().to(dtype or torch.float32)


# --------------------------------------------------------------------------------------------------------------------
# What does not apply

_PROMPTS = "only for methods that learn a prompt; a memory is weights"
_BIAS = "LocasConfig has no `bias`: a memory never trains the biases of its host"
_COMBINE = "add_weighted_adapter adds low-rank updates of a matrix; memories add by being active or merged together"
_STRUCTURE = (
    "about tables of module names for model types; a memory finds the FFNs by their structure"
)
_TYING = "about embeddings that are tied to others, on which no method has an influence"
NOT_APPLICABLE = {
    "TestDecoderModels": {
        "test_prompt_tuning_text_prepare_for_training": _PROMPTS,
        "test_prompt_tuning_sample_vocab_prepare_for_training": _PROMPTS,
        "test_training_prompt_learning_tasks": _PROMPTS,
        "test_prompt_learning_with_gradient_checkpointing": _PROMPTS,
        "test_set_requires_grad_prompt_learning_raises": _PROMPTS,
        "test_adding_multiple_adapters_with_bias_raises": _BIAS,
        "test_weighted_combination_of_adapters": _COMBINE,
        "test_lora_conversion": "neurons with an activation equal no low-rank update of a matrix",
        "test_save_pretrained_targeting_lora_to_embedding_layer": "LoRA on an embedding",
    },
    "TestSequenceClassificationModels": {
        "test_prompt_tuning_text_prepare_for_training": _PROMPTS,
        "test_prompt_learning_forward_with_inputs_embeds": _PROMPTS,
    },
    "TestPeftFeatureExtractionModel": {
        "test_training_layer_indexing": "PEFT finds no index in `layers.0.mlp` of a bare decoder, for LoRA neither",
        "test_training_prompt_learning_tasks": _PROMPTS,
        "test_passing_input_embeds_works": _PROMPTS,
        "test_weighted_combination_of_adapters": _COMBINE,
    },
    "TestPeftCustomModel": {
        "test_adding_multiple_adapters_with_bias_raises": _BIAS,
        "test_disable_adapter_with_bias_warns": _BIAS,
        "test_add_weighted_adapter_cat_with_rank_pattern": _COMBINE,
        "test_save_pretrained_targeting_lora_to_embedding_layer": "LoRA on an embedding",
        "test_save_pretrained_targeting_lora_to_embedding_layer_non_transformers": "LoRA on an embedding",
    },
    "TestPeftFsdpStateDict": {"test_save_load_roundtrip_fsdp_wrapped_learnable_bias": _BIAS},
    "TestMixedAdapterBatches": {
        "test_mixed_adapter_batches_unsupported_layer_raises": "about modules_to_save on a GRU, not about the method",
        "test_mixed_adapter_batches_lora_conv1d_emb": "LoRA on a convolution and an embedding",
        "test_mixed_adapter_batches_lora_conv1d_emb_multiple_modules_to_save": "LoRA on a convolution",
        "test_mixed_adapter_batches_lora_conv2d": "LoRA on a convolution",
        "test_mixed_adapter_batches_mha_raises": "LoRA on an attention layer",
        "test_mixed_adapter_batches_lora_opt_timing": "times OPT-125m, from the hub, on an accelerator",
    },
    "TestLowLevelFunctional": {
        "test_inject_adapter_in_model_rejects_shared_state_tuners": "memories of different FFNs share no weights",
    },
    "TestPeftStateDict": {
        "test_base_model_module_named_like_peft_prefix": "has a table of the prefixes of two methods"
    },
    "TestTrainableTokens": {
        "test_weight_tying_applied_when_model_is_tied": _TYING,
        "test_weight_tying_applied_when_model_is_tied_encoder_decoder": _TYING,
    },
    "TestDefaultTargetModules": {
        "test_default_target_modules_not_set_raises": _STRUCTURE,
        "test_default_target_modules_not_set_model_type_set_raises": _STRUCTURE,
        "test_default_target_modules_list_of_str": _STRUCTURE,
        "test_default_target_modules_str": _STRUCTURE,
    },
}

# What PEFT skips for a part of the cases, in its own words; any other skip fails.
SKIPPED_BY_PEFT = {
    "test_active_adapter": "Multiple active adapters with modules_to_save/trainable_token_indices is not supported.",
}


# --------------------------------------------------------------------------------------------------------------------
# Our matrix


@dataclass
class ReadyConfig(LocasConfig):
    """For the tests that construct the config class themselves: its default memory needs no calibration."""

    init_weights: bool | str = "random"
    r: int = 4


READY = {"r": 4, "init_weights": "random"}
TOPK = {"r": 4}


def family_cases(head: str, task_type: str, families=FIVE, topk=(), slow=()) -> list:
    cases = [(family, READY, family, ()) for family in families]
    cases += [(family, TOPK, f"{family}-topk", ()) for family in topk]
    cases += [(family, READY, family.replace(" ", "-"), pytest.mark.slow) for family in slow]
    return [
        pytest.param(
            model_folder(family, head),
            LocasConfig,
            {"task_type": task_type, **fields},
            id=name,
            marks=marks,
        )
        for family, fields, name, marks in cases
    ]


_toy_configs = {
    "Toy all": ("Toy", {}),
    "Toy ranks": ("Toy", {"target_modules": ["lin0", "ffn1"], "rank_pattern": {"ffn1": 2}}),
    "Toy modules_to_save": ("Toy", {"target_modules": ["lin0"], "modules_to_save": ["lin1"]}),
    "ToyPlain all": ("ToyPlain", {}),
    "ToyConv1D all": ("ToyConv1D", {}),
    "ToyEmbedding tokens": ("ToyEmbedding", {"trainable_token_indices": {"emb": [0, 1, 2]}}),
}
TOY_CASES = [
    # With the paper's scale, a few steps of plain SGD move the weights by more than PEFT's tolerances.
    pytest.param(
        name,
        model,
        LocasConfig,
        {**READY, "output_scale": "paper", **fields},
        id=name.replace(" ", "-"),
    )
    for name, (model, fields) in _toy_configs.items()
]


def trained(**fields) -> LocasConfig:
    """A config whose memory changes the output, as a trained one does."""
    return LocasConfig(r=4, **fields, init_weights=False)


_one = {**READY, "target_modules": ["lin0"], "init_weights": False}
_other = {**READY, "target_modules": ["ffn1"], "init_weights": False}
_wider = {**_one, "r": 8}
ACTIVE_CASES = [
    pytest.param("LOCAS same", "locas", LocasConfig, _one, _one, id="same"),
    pytest.param("LOCAS different", "locas", LocasConfig, _one, _other, id="different"),
    pytest.param("LOCAS wider", "locas", LocasConfig, _one, _wider, id="wider"),
]
MIXED_CASES = [("LOCAS", trained(target_modules=["lin0"]), LocasConfig(**_wider))]
_saved = trained(target_modules=["lin0"], modules_to_save=["lin1"])
_BY_FAMILY = ("model_id", "config_cls", "config_kwargs")
_BY_TOY = ("test_name", "model_id", "config_cls", "config_kwargs")
_BY_CLASS = {("config_cls",): [ReadyConfig]}
_ACTIVE = ("test_name", "tuner_method", "config_cls", "config_kwargs_1", "config_kwargs_2")
_CONFIG = {("config_class", "mandatory_kwargs"): [(LocasConfig, {}), (LocasConfig, READY)]}
CARD_CASES = [
    pytest.param(
        model_folder(family, "lm"), LocasConfig(**READY, task_type=task_type), ["transformers"], ["lora"], pipeline,
        id=f"{family}-{task_type}",
    )
    for family in ("qwen3", "gpt2")
    for task_type, pipeline in ((None, None), ("CAUSAL_LM", "text-generation"))
]  # fmt: skip
INJECT_CASES = [
    pytest.param(
        (transformers_class, model_folder(family, head)),
        LocasConfig(**READY),
        id=f"{family}-{head}",
    )
    for family, head, transformers_class in (
        *((family, "lm", transformers.AutoModelForCausalLM) for family in FIVE),
        ("qwen3", "cls", transformers.AutoModelForSequenceClassification),
        ("gpt2", "base", transformers.AutoModel),
    )
]


def _with_tokens(indices, **fields) -> LocasConfig:
    return LocasConfig(**READY, trainable_token_indices={"embed_tokens": indices}, **fields)


def load_model(self) -> transformers.PreTrainedModel:
    make_model(model_folder("llama", "lm"))
    return transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama", "lm"))


MATRIX = {
    "TestDecoderModels": {
        _BY_FAMILY: family_cases("lm", "CAUSAL_LM", topk=["qwen3", "gpt2"], slow=OTHERS)
    },
    "TestSequenceClassificationModels": {
        _BY_FAMILY: family_cases("cls", "SEQ_CLS", ["qwen3", "gpt2"], slow=["llama", "phi3", "opt"])
    },
    "TestTokenClassificationModels": {
        _BY_FAMILY: family_cases("tokens", "TOKEN_CLS", ["qwen3", "gpt2"])
    },
    "TestQuestionAnsweringModels": {
        _BY_FAMILY: family_cases("qa", "QUESTION_ANS", ["qwen3", "gpt2"])
    },
    "TestPeftFeatureExtractionModel": {
        _BY_FAMILY: family_cases("base", "FEATURE_EXTRACTION", ["qwen3", "gpt2"])
    },
    "TestPeftCustomModel": {
        _BY_TOY: TOY_CASES,
        "test_adapter_dtype_autocast": TOY_CASES[:4:3],  # 12 pairs of dtypes each
        ("config0",): [trained(target_modules=["lin0"])],
        **_BY_CLASS,
    },
    "TestPeftFsdpStateDict": {_BY_TOY: TOY_CASES},
    "TestMultipleActiveAdapters": {_ACTIVE: ACTIVE_CASES},
    "TestRequiresGrad": _BY_CLASS,
    "TestMixedAdapterBatches": {
        ("test_name", "config0", "config1"): MIXED_CASES,
        ("test_name", "config"): [("LOCAS", trained(target_modules=["lin0"]))],
        "test_mixed_adapter_batches_different_target_layers": [
            ("LOCAS", trained(target_modules=["lin0"]), trained(target_modules=["ffn1"]))
        ],
        "test_mixed_adapter_batches_partly_overlapping_target_layers": [
            ("LOCAS", trained(target_modules=["lin0"]), trained(target_modules=["lin0", "ffn1"]))
        ],
        "test_mixed_adapter_batches_multiple_modules_to_save": [("LOCAS", _saved, _saved)],
    },
    "TestPeftConfig": {
        **_CONFIG,
        ("config_class",): [LocasConfig],
        "test_from_peft_type": None,  # has no parameters, but goes through all methods
    },
    "TestDefaultTargetModules": {},
    "TestModelCard": {
        ("model_id", "peft_config", "tags", "excluded_tags", "pipeline_tag"): CARD_CASES
    },
    "TestLowLevelFunctional": {},
    "TestInjectAdapterFromStateDict": {("model_cls_and_id", "config"): INJECT_CASES},
    "TestPeftStateDict": {},
    "TestAdapterTargeting": {
        ("config_cls", "config_kwargs"): [
            (LocasConfig, {**READY, "target_modules": each}) for each in ("lin0", "(lin0|ffn1)")
        ]
    },
    "TestTrainableTokens": {
        ("peft_config",): [_with_tokens([0, 1, 3])],
        ("peft_config_factory",): [_with_tokens],
        "test_modules_to_save_excludes_trainable_tokens": [
            _with_tokens([0, 1, 3], modules_to_save=["embed_tokens"])
        ],
        "test_multiple_adapters_mixed_forward": [lambda targets, tokens: _with_tokens(tokens)],
        "test_combined_with_peft_raises_target_layer_not_found": [
            (
                LocasConfig(**READY, trainable_token_indices={"does-not-exist": [0, 1, 2]}),
                "does-not-exist",
            )
        ],
        "test_save_pretrained_auto": [LocasConfig(**READY, trainable_token_indices=[1, 2, 3])],
    },
}
FIXTURES = {
    "TestAdapterTargeting": {"base_model_cls": pytest.fixture(lambda self: Toy)},
    "TestTrainableTokens": {
        "model": pytest.fixture(load_model),
        "tokenizer": pytest.fixture(lambda self: None),
    },
}
"""In place of the fixtures of PEFT's classes that read from the hub, or that have no FFN."""


# --------------------------------------------------------------------------------------------------------------------
# PEFT's tests with our matrix


@contextlib.contextmanager
def replaced(name: str):
    """Puts our toys in place of PEFT's, and opens what PEFT opens to methods by name only."""
    patches = [mock.patch.multiple(custom, MLP=Toy, DeepMLP=DeepToy)]
    if "mixed_adapter_batches" in name:  # `adapter_names`: "if config_cls != LoraConfig: skip"
        patches += [
            mock.patch.object(module, "LoraConfig", LocasConfig) for module in (decoder, common)
        ]
    if "generate_with_mixed" in name:  # makes the memories ten times stronger than the clip allows
        patches += [mock.patch.object(NormClip, "clip_")]
    if name == "test_from_peft_type":  # goes through all methods, some of which need other packages
        patches += [mock.patch.object(config_tests, "PeftType", [peft.PeftType.LOCAS])]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def guarded(test, name: str):
    """Wraps one of PEFT's tests: in our surroundings, and failing where PEFT's code skips it."""

    @functools.wraps(test)
    def run(self, *args, **kwargs):
        try:
            with replaced(name):
                test(self, *args, **kwargs)
        except pytest.skip.Exception as skipped:
            if str(skipped) != SKIPPED_BY_PEFT.get(name):
                pytest.fail(
                    f"PEFT's test skips itself, for a reason that is not listed here: {skipped}"
                )
            raise

    return run


def not_applicable(reason: str):
    @pytest.mark.skip(reason=reason)
    def test(self):
        pass

    return test


def failing(message: str):
    return lambda self: pytest.fail(message)


# A test whose parameters name one of these is one of the matrix; the names below are what the matrix fills in.
_CONFIGS = {"config_cls", "config_class", "config0", "config", "peft_config", "peft_config_factory"}
_FILLED = _CONFIGS | {
    "config1",
    "config_kwargs",
    "config_kwargs_1",
    "config_kwargs_2",
    "mandatory_kwargs",
}
_FILLED |= {"model_id", "test_name", "tuner_method", "model_cls_and_id", "target_layer_name"}
_FILLED |= {"tags", "excluded_tags", "pipeline_tag"}


def names_of(mark) -> set[str]:
    """The parameters that a parametrize mark fills in."""
    if mark.name != "parametrize":
        return set()
    names = mark.args[0]
    return {name.strip() for name in names.split(",")} if isinstance(names, str) else set(names)


def with_our_matrix(theirs: type) -> type | None:
    """Subclasses a class of PEFT's tests: its matrix tests with our cases, and none of its other tests."""
    matrix, reasons = MATRIX.get(theirs.__name__, {}), dict(NOT_APPLICABLE.get(theirs.__name__, {}))
    ours, found = {}, False
    for name, test in vars(theirs).items():
        if not (name.startswith("test_") and inspect.isfunction(test)):
            continue
        marks = getattr(test, "pytestmark", [])
        parameters = set().union(*map(names_of, marks))
        ours[name] = None  # not collected
        if not parameters & _CONFIGS and name not in matrix:
            continue
        found = True
        if name in reasons:
            ours[name] = not_applicable(reasons.pop(name))
            continue
        filled = tuple(
            parameter for parameter in inspect.signature(test).parameters if parameter in _FILLED
        )
        if name not in matrix and filled not in matrix:
            ours[name] = failing(
                f"neither in MATRIX, with {', '.join(filled)}, nor in NOT_APPLICABLE"
            )
            continue
        ours[name] = guarded(test, name)
        ours[name].pytestmark = [mark for mark in marks if not names_of(mark) & _FILLED]
        if filled:
            cases = pytest.mark.parametrize(",".join(filled), matrix.get(name) or matrix[filled])
            ours[name].pytestmark.append(cases.mark)
    for name in reasons:
        ours[name] = failing("in NOT_APPLICABLE, but PEFT has no such test")
    if not found:
        return None
    if getattr(theirs, "transformers_class", None) is custom.MockTransformerWrapper:
        ours["transformers_class"] = ToyLoader
    return type(
        theirs.__name__,
        (theirs,),
        {**ours, **FIXTURES.get(theirs.__name__, {}), "__module__": __name__},
    )


for _module in (decoder, custom, config_tests, seq_classifier, features, token_qa, *further):
    for _theirs in list(vars(_module).values()):
        if (
            inspect.isclass(_theirs)
            and _theirs.__module__ == _module.__name__
            and _theirs.__name__.startswith("Test")
        ):
            _ours = with_our_matrix(_theirs)
            if _ours is not None:
                globals()[_ours.__name__] = _ours
_theirs = _ours = None  # or pytest would collect them
