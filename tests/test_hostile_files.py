"""Memory files of unknown origin: random changes of bytes, headers, tensors and configs are refused or load soundly.

    pytest tests/test_hostile_files.py                                     # 240 cases, always the same
    LOCAS_FUZZ_CASES=100000 pytest tests/test_hostile_files.py -m slow     # 35 minutes of one core; 2,000 if not set

A case that fails is reduced to the fewest and simplest changes that fail, which are printed.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import struct
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest
import torch
import transformers as tf
from families import change_config, logits, make_host, make_model, rewrite, same, snapshot
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from locas_peft import LocasConfig, calibrate
from locas_peft.memories import describe_memory, load_memory, save_memory
from locas_peft.tuner.modules import remember_modules

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CASES = 400
LIMIT_SECONDS = 5.0  # of processor time: other processes may slow a test down
TOKENS = torch.arange(3, 27).reshape(2, 12)
# The reasons to refuse a sound file for this base. For any other reason `describe_memory` must refuse it too.
OTHER_BASE = (
    "made for another base",
    "does not fit the model",
    "does not fit Qwen3ForCausalLM",
    "does not fit LlamaForCausalLM",
    "cannot do: load the base",
    "must be below the",
    "no FFN of a known structure",
    "can have no gains",
    "which is no FFN",
    "has no projection named",
    "computes something other than",
    "needs a two-layer memory",
    "host's width where slots are cloned",
    "Target modules",
    "No modules were targeted",
    "All modules were excluded",
    "You are trying to target a module",
    "already marked to be trained fully",
    "activation",
    "is a weight of the base and no part of the adapter",  # of a file whose config names another type than LOCAS
)


# ---------------------------------------------------------------------------------------------------------- changes


inf, nan = float("inf"), float("nan")
FACTORS = st.sampled_from(
    [0.0, -0.0, 1e-45, 1e-30, 1.0, -1.0, 1e4, 1e12, 1e13, 1e20, 3e38, inf, nan]
)
SLOW_PATTERN = "(.*)*" * 12 + "$!"
STRINGS = [
    "",
    "mlp",
    "model.layers.0.mlp",
    "all-linear",
    ".*",
    SLOW_PATTERN,
    "(" * 9999,
    "\ud800",
    "a\nb",
    "\x1b[2J",
]
STRINGS += [
    "CAUSAL_LM",
    "SEQ_2_SEQ_LM",
    "SEQ_CLS",
    "TOKEN_CLS",
    "QUESTION_ANS",
    "LORA",
    "IA3",
    "write",
    "paper",
]
NUMBERS = [None, True, False, 0, 1, -1, 3, 10**9, 10**30, 0.5, 1e308, -1e308, 1e12, inf, nan]
LISTS = [
    [],
    [0],
    [5, 6],
    [-1],
    [10**9],
    [[]],
    [None],
    ["mlp"],
    ["lm_head"],
    ["model.norm"],
    [SLOW_PATTERN],
    [""],
]
OBJECTS = [
    {},
    {"mlp": 3},
    {SLOW_PATTERN: 3},
    {"embed_tokens": [1]},
    {"x": {}},
    {"up": "up_proj", "down": "down_proj"},
]
VALUES = st.sampled_from(STRINGS + NUMBERS + LISTS + OBJECTS)
OTHER_KEYS = st.sampled_from(
    ["cls", "self", "runtime_config", "unknown", "target_parameters", "bias", "\n"]
)


def change_bytes(draw, folder: Path) -> None:
    path = folder / draw(st.sampled_from([TENSORS, CONFIG]))
    data = bytearray(path.read_bytes())
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, max(len(data) - 1, 0)) | st.integers(0, min(len(data), 2000)))
        old = draw(st.sampled_from([0, 1, 4, 4096, len(data)]))
        data[at : at + old] = draw(st.binary(max_size=min(old, 100) or 4))
    path.write_bytes(bytes(data))


SHAPES = [[], [0], [-1], [10**18], [2**63], [3, 16], [16, 3], [1, 48], [48], ["a"], None]
METADATA = [{}, {"locas_digest": "x"}, {"a": 1}, None, [], {"format": "tf"}]


def change_header(draw, folder: Path) -> None:
    data = (folder / TENSORS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = st.sampled_from(sorted(key for key in header if key != "__metadata__"))
    key, other, kind = draw(names), draw(names), draw(st.integers(0, 7))
    entry = header[key]
    if kind == 0:
        entry["dtype"] = draw(
            st.sampled_from(
                ["F32", "F16", "BF16", "F64", "I8", "U8", "I64", "BOOL", "F8_E4M3", "C64", "X"]
            )
        )
    elif kind == 1:
        entry["shape"] = draw(st.sampled_from(SHAPES))
    elif kind == 2:
        entry["data_offsets"] = [draw(st.integers(-9, 2 * len(rest))) for _ in range(2)]
    elif kind == 3:
        new = ["", "a\nb", key.upper(), key + "x", "locas_up.weight", ".locas_tau"]
        header[draw(st.sampled_from(new))] = header.pop(key)
    elif kind == 4:
        del header[key]
    elif kind == 5:
        header[key], header[other] = header[other], header[key]
    elif kind == 6:
        header["__metadata__"] = draw(st.sampled_from(METADATA))
    else:
        entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"]))] = draw(
            st.sampled_from([None, {}, "", 5])
        )
    if draw(st.booleans()) and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"].pop("locas_digest", None)
    text = json.dumps(header).encode(errors="surrogatepass")
    length = draw(
        st.just(len(text)) | st.sampled_from([0, 1, len(text) // 2, len(text) + 8, 2**40, 2**63])
    )
    (folder / TENSORS).write_bytes(struct.pack("<Q", length) + text + rest)


DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool])
RENAMES = [
    ("0", "7"),
    ("mlp", "self_attn"),
    ("locas_", "locas_x"),
    ("model.", ""),
    ("mlp", "mlp.x"),
]


def change_tensors(draw, folder: Path) -> None:
    tensors, base = load_file(folder / TENSORS), base_state()
    for _ in range(draw(st.integers(1, 2))):
        key, kind, name = (
            draw(st.sampled_from(sorted(tensors))),
            draw(st.integers(0, 8)),
            draw(names_of_base()),
        )
        tensor = tensors[key]
        if kind == 0:
            tensors.pop(key)
        elif kind == 1:
            tensors[key] = torch.full_like(tensor.float(), draw(FACTORS))
        elif kind == 2:
            tensors[key] = tensor * draw(FACTORS)
        elif kind == 3:
            tensors[key] = tensor.to(draw(DTYPES))
        elif kind == 4:
            others = [tensor.T, tensor[None], tensor.reshape(-1)[:1], tensor.new_zeros(0)]
            tensors[key] = draw(st.sampled_from(others)).contiguous()
        elif kind == 5:
            tensors[f"base_model.model.{name}"] = base[name] + draw(
                st.sampled_from([0.0, 1.0, nan])
            )
        elif kind == 6:
            tensors[key.replace(*draw(st.sampled_from(RENAMES)))] = tensors.pop(key)
        elif kind == 7:
            tensors[f"base_model.model.{name.replace('mlp.', 'mlp.base_layer.')}"] = torch.zeros(3)
        elif tensor.numel():
            flat = tensor.clone().reshape(-1)
            flat[draw(st.integers(0, len(flat) - 1))] = (
                draw(FACTORS) if flat.is_floating_point() else 1
            )
            tensors[key] = flat.reshape(tensor.shape)
        if not tensors:
            break
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    if draw(st.integers(0, 9)) == 9:
        torch.save(tensors, folder / "adapter_model.bin")
        (folder / TENSORS).unlink()
    else:
        save_file(tensors, folder / TENSORS)


NO_CONFIGS = ["[" * 100_000, "[]", "null", "5", "", '"x"', "{" + '"a":{' * 20_000, "{"]


def change_config_file(draw, folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    for _ in range(draw(st.integers(1, 4))):
        name, kind = draw(st.sampled_from(sorted(config))), draw(st.integers(0, 9))
        if kind == 9:
            config.pop(name)
        elif kind == 8:
            config[draw(OTHER_KEYS)] = draw(VALUES)
        elif kind == 7 and isinstance(config.get("record"), dict):
            change_record(draw, config["record"])
        elif kind == 6:
            # Sound for a base with such layers.
            config["layers_to_transform"] = draw(st.lists(st.integers(0, 2), min_size=1))
        else:
            config[name] = draw(VALUES)
        if not config:
            break
    text = (
        json.dumps(config) if draw(st.integers(0, 29)) < 29 else draw(st.sampled_from(NO_CONFIGS))
    )
    (folder / CONFIG).write_text(text, encoding="utf-8")


def change_record(draw, record: dict) -> None:
    host = record.get("host")
    if isinstance(host, dict) and host and draw(st.booleans()):
        host[draw(st.sampled_from([*sorted(host), "a\nb"]))] = draw(VALUES)
    else:
        record[draw(st.sampled_from(["host", "slots", "saved_embeddings", "a\nb"]))] = draw(VALUES)


CHANGES = st.sampled_from([change_bytes, change_header, change_tensors, change_config_file])
# A change may not apply to what an earlier one has damaged.
DAMAGED = (
    ValueError,
    KeyError,
    IndexError,
    OSError,
    RuntimeError,
    TypeError,
    AttributeError,
    SafetensorError,
    struct.error,
)


# ------------------------------------------------------------------------------------------------------------ cases


def make_base():
    return make_host("qwen3").requires_grad_(False)


@functools.cache
def base_state() -> dict[str, torch.Tensor]:
    return make_base().state_dict()


def names_of_base() -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(base_state()))


@pytest.fixture(scope="module")
def base():
    return make_base()


@pytest.fixture(scope="module")
def memories(tmp_path_factory) -> list[Path]:
    """A memory that has learned, one with other trained modules beside it, an empty one, and one with gains."""
    folder = tmp_path_factory.mktemp("memories")
    beside = {"modules_to_save": ["model.norm"], "trainable_token_indices": [5, 6]}
    kinds = (("plain", {}), ("beside", beside), ("empty", {}), ("gains", {"gains": True}))
    for name, fields in kinds:
        model = get_peft_model(make_base(), LocasConfig(r=3, task_type="CAUSAL_LM", **fields))
        if name != "empty":
            calibrate(model, [TOKENS])
            for key, parameter in model.named_parameters():
                if "locas_down" in key or "locas_gain" in key:
                    parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder / name)
    return [folder / name for name, _ in kinds]


def attempt(load, *args):
    """Return a function's result and None, or None and its ValueError."""
    try:
        return load(*args), None
    except ValueError as error:
        assert "\n" not in str(error), str(error)
        assert str(error)
        return None, error


def run_case(memories: list[Path], base, draw, folder: Path) -> str:
    """Change a memory, describe it, load it, and return what happened."""
    shutil.copytree(draw(st.sampled_from(memories)), folder)
    for change in draw(st.lists(CHANGES, min_size=1, max_size=2)):
        with suppress(*DAMAGED):
            change(draw, folder)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    modules = [(name, type(module)) for name, module in base.named_modules()]
    restore = remember_modules(base)
    start = time.process_time()
    described, refused = attempt(describe_memory, folder)
    loaded, error = attempt(load_memory, base, folder)
    outcome = "refused" if error else "loaded"
    if error is None:
        assert refused is None, f"describe_memory refuses a memory that loads: {refused}"
        with torch.no_grad():
            output = loaded.eval()(input_ids=TOKENS)
        assert output.logits.isfinite().all()
        if not loaded.peft_config["default"].modules_to_save:
            loaded.unload()
        restore()  # PEFT's unload leaves fully trained modules in the model
    elif refused is None:
        assert any(reason in str(error) for reason in OTHER_BASE), (
            f"describe_memory accepts: {error}"
        )
        outcome = "refused for this base"
    assert time.process_time() - start < LIMIT_SECONDS
    assert [(name, type(module)) for name, module in base.named_modules()] == modules
    after = base.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not hasattr(base, "peft_config") and not base._forward_pre_hooks
    assert not any(parameter.requires_grad for parameter in base.parameters())
    return outcome


def run_cases(memories, folder: Path, cases: int, **options) -> Counter:
    outcomes, bases = Counter(), [make_base()]

    @hypothesis.settings(
        max_examples=cases, deadline=None, suppress_health_check=hypothesis.HealthCheck, **options
    )
    @hypothesis.given(st.data())
    def run(data) -> None:
        shutil.rmtree(folder / "case", ignore_errors=True)
        try:
            outcomes[run_case(memories, bases[0], data.draw, folder / "case")] += 1
        except BaseException:
            bases[0] = make_base()  # it may have been changed
            raise

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    return outcomes


def test_changed_memories_are_refused_or_sound(memories, tmp_path):
    outcomes = run_cases(memories, tmp_path, CASES, derandomize=True, database=None)
    # The changes must reach every outcome: a loader that refuses everything would pass the checks of a case.
    assert (
        outcomes["refused"] > 100
        and outcomes["loaded"] > 20
        and outcomes["refused for this base"] > 2
    )


@pytest.mark.slow
def test_more_changed_memories_are_refused_or_sound(memories, tmp_path):
    run_cases(memories, tmp_path, int(os.environ.get("LOCAS_FUZZ_CASES", 2000)))


def test_memories_without_a_change_load(memories, base):
    for memory in memories:
        assert describe_memory(memory)["learned"] is (memory.name != "empty")
        loaded = load_memory(base, memory)
        different = not torch.equal(
            loaded(input_ids=TOKENS).logits, make_base()(input_ids=TOKENS).logits
        )
        assert different is (memory.name != "empty")
        loaded.unload()


# ---------------------------------------------------------------------------------------------------- known attacks

UP = "base_model.model.model.layers.1.mlp.locas_up.weight"
HEAD, EMBEDDINGS = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
SAVED = {"modules_to_save": ["lm_head"]}
NAMED = {"record": {"saved_embeddings": ["model.embed_tokens.weight"]}}
TOKEN_INDICES = {"trainable_token_indices": [5, 6]}
FOREIGN = "is a weight of the base and no part of a memory"
NO_FLOAT = "is of torch.int8, a floating dtype of 16 bits or more expected"


def put(**tensors):
    """A change that puts tensors into a file, under their names in this module or else in full."""
    return lambda t: t.update({globals().get(key, key): value for key, value in tensors.items()})


def as_layer_2(tensors):
    tensors.update(
        {
            k.replace("layers.1", "layers.2"): v.clone()
            for k, v in tensors.items()
            if "layers.1" in k
        }
    )


def without_prefix(tensors):
    for key in list(tensors):
        tensors[key.removeprefix("base_model.model.")] = tensors.pop(key)


ones, int8 = torch.ones, torch.ones(64, 16, dtype=torch.int8)
# What is wrong: fields of the memory's config, the change of its tensors, the change of its config, and the refusal.
ATTACKS = {
    "part missing": ({}, lambda t: t.pop(UP), {}, "at model.layers.1.mlp: locas_up is missing. Save the memory"),
    "other r": ({}, put(UP=ones(5, 16)), {}, r"locas_up has shape \[5, 16\], expected \[4, 16\]"),
    "no parts": ({}, None, {"ffn_parts": {}}, "ffn_parts must name down and either up"),
    "other D": ({}, put(UP=ones(4, 8)), {}, r"locas_up has shape \[4, 8\], expected \[4, 16\]"),
    "r of a billion": ({}, None, {"r": 10**9, "init_weights": "gaussian"}, "its config at model.layers.0.mlp: "),
    "not finite": ({}, lambda t: t[UP].fill_(torch.inf), {}, r"locas_up\.weight holds values that are not finite"),
    "not finite beside modules": (
        SAVED | TOKEN_INDICES, lambda t: t[UP].fill_(torch.nan), {}, "holds values that are not finite"
    ),
    "layer missing": (
        {}, lambda t: [t.pop(k) for k in list(t) if "layers.1" in k], {}, r"the file has no .*layers.1.mlp.locas_"
    ),
    "layer too many": ({}, as_layer_2, {}, r"the model has no layer for .*layers.2.mlp.locas_"),
    "empty": ({}, lambda t: t.clear(), {}, "holds no LOCAS memory"),
    "int8": ({}, lambda t: t.update({UP: t[UP].to(torch.int8)}), {}, NO_FLOAT),
    "float8": (
        {}, lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), {}, "is of torch.float8_e4m3fn, a floating dtype"
    ),
    "without PEFT's prefix": (
        {}, without_prefix, {}, r"model\.layers\.0\.mlp\.\S+ must start with 'base_model\.model\.', as PEFT"
    ),
    "head without PEFT's prefix": (
        SAVED, lambda t: t.update({"lm_head.weight": t.pop(HEAD)}), {}, r"lm_head\.weight must start with 'base_model"
    ),
    "norm": ({}, lambda t: t.update({"base_model.model.model.norm.weight": ones(16)}), {}, rf"norm\.weight {FOREIGN}"),
    "wrapped": (
        {}, lambda t: t.update({UP.replace("locas_up", "base_layer.up_proj"): ones(24, 16)}), {},
        rf"base_layer\.up_proj\.weight {FOREIGN}",
    ),
    "embedding": ({}, put(EMBEDDINGS=ones(64, 16)), {}, rf"embed_tokens\.weight {FOREIGN}"),
    "embedding not finite": (
        {}, put(EMBEDDINGS=ones(64, 16) * torch.nan), {}, r"embed_tokens\.weight holds values that are not finite"
    ),
    "head": ({}, put(HEAD=ones(64, 16)), {}, rf"lm_head\.weight {FOREIGN}; get the file from a trusted source"),
    "head int8": ({}, put(HEAD=int8), {}, rf"lm_head\.weight {FOREIGN}"),
    "no tensor's name": (
        {}, lambda t: t.update({"base_model.model.nonsense\nweight": ones(1)}), {}, rf"nonsense\\nweight {FOREIGN}"
    ),
    "weights absurd": (
        {}, lambda t: t[UP].mul_(1e20), {}, r"locas_up\.weight holds [\d.]+e\+\d+, at most 1e\+12 in size expected"
    ),
    "tau absurd": (
        {}, lambda t: t[UP.replace("locas_up.weight", "locas_tau")].fill_(1e38), {},
        r"locas_tau holds 1e\+38, at most 1e\+12 in size expected",
    ),
    "product absurd": (
        {}, lambda t: [t[UP.replace("up.weight", part)].mul_(1e6) for part in ("tau", "input_scale")], {},
        r"at model.layers.1.mlp: the product of its largest numbers is \d",
    ),
    # configs
    "scaling absurd": ({}, None, {"scaling": 1e308}, r"scaling must be finite, at most 1e12 in size, got 1e\+308"),
    "scaling of many digits": (
        {}, None, {"scaling": 10**30}, f"scaling must be finite, at most 1e12 in size, got {10**30}"
    ),
    "product with scaling": ({}, None, {"scaling": 1e12}, "the product of its largest numbers is"),
    "clip": (
        {}, None, {"max_slot_norm": float("inf")}, "max_slot_norm must be finite and above 0, .*, got inf"
    ),
    "tokens": (
        {}, None, {"trainable_token_indices": 0}, "trainable_token_indices must be a list of token ids, .*, got 0"
    ),
    "no token": ({}, None, {"trainable_token_indices": [1]}, "no tensor is for trainable_token_indices. Save"),
    "no module": ({}, None, SAVED, "no tensor is for modules_to_save. Save the memory again."),
    "no embedding": ({}, None, {"record": {"saved_embeddings": ["lm_head.weight"]}}, "no tensor is for saved_embeddings"),
    "slow modules": ({}, None, {"modules_to_save": ["(.*)*" * 12 + "$!"]}, "modules_to_save must be names, got"),
    "task": (
        {}, None, {"task_type": "SEQ_2_SEQ_LM"}, "task_type 'SEQ_2_SEQ_LM', which LlamaForCausalLM cannot do"
    ),
    "task of two lines": ({}, None, {"task_type": "a\nb"}, r"Invalid task type: 'a\\nb'"),
    "deep pattern": ({}, None, {"target_modules": "(" * 10_000}, "target_modules must be a regular expression"),
    "parts": ({}, None, {"ffn_parts": {"up": "a", "down": "b"}}, "."),
    "field of Python": ({}, None, {"cls": 1}, "adapter_config.json .*: copy or save the memory again$"),
    "self": ({}, None, {"self": 1}, "adapter_config.json .*: copy or save the memory again$"),
    # what is trained beside the memory
    "head missing": (SAVED, lambda t: t.pop(HEAD), {}, "no tensor is for modules_to_save"),
    "head of another shape": (
        SAVED, put(HEAD=ones(64, 8)), {}, r"lm_head.*weight has shape \[64, 8\], expected \[64, 16\]"
    ),
    "trained head int8": (SAVED, put(HEAD=int8), {}, rf"lm_head.*weight {NO_FLOAT}"),
    "original head": (
        SAVED, lambda t: t.update({HEAD.replace("head", "head.original_module"): ones(64, 16)}), {},
        rf"lm_head\.original_module\.weight {FOREIGN}",
    ),
    "head of another name": (
        SAVED, lambda t: t.update({HEAD.replace("weight", "bias"): t.pop(HEAD)}), {},
        r"the file has no base_model\.model\.lm_head\.weight",
    ),
    "more tokens than in the file": (
        TOKEN_INDICES, None, {"trainable_token_indices": [5, 6, 7]},
        r"trainable_tokens_delta.* has shape \[2, 16\], expected \[3, 16\]",
    ),
    "saved embeddings of another shape": (
        {}, put(EMBEDDINGS=ones(64, 8)), NAMED, r"embed_tokens\.weight has shape \[64, 8\], expected \[64, 16\]"
    ),
    "saved embeddings int8": ({}, put(EMBEDDINGS=int8), NAMED, rf"embed_tokens\.weight {NO_FLOAT}"),
    "saved embeddings not finite": (
        {}, put(EMBEDDINGS=ones(64, 16) * torch.inf), NAMED, r"embed_tokens\.weight holds values that are not finite"
    ),
    "norm as an embedding": (
        {}, lambda t: t.update({"base_model.model.model.norm.weight": ones(16)}),
        {"record": {"saved_embeddings": ["model.norm.weight"]}}, rf"model\.norm\.weight {FOREIGN}",
    ),
} | {
    f"tokens {indices}": (
        TOKEN_INDICES, None, {"trainable_token_indices": indices},
        r"trainable_token_indices must be below the 64 rows of model.embed_tokens, got \d+: use ids of this",
    )
    for indices in ([10**9], [64], {"embed_tokens": [5, 64]})
} | {
    f"norm beside {task}": (
        {}, lambda t: t.update({"base_model.model.model.norm.weight": ones(16)}), {"task_type": task},
        rf"model\.norm\.weight {FOREIGN}",
    )
    for task in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
}  # fmt: skip


@pytest.fixture
def memory(tmp_path):
    make_model().save_pretrained(tmp_path)
    return tmp_path


def assert_refused(folder, message, host):
    """Loading refuses in one line, and the host is as it was."""
    before, names, hooks = (
        snapshot(host),
        [name for name, _ in host.named_modules()],
        dict(host._forward_pre_hooks),
    )
    with pytest.raises(ValueError, match=message) as error:
        load_memory(host, folder)
    assert "\n" not in str(error.value)
    assert same(host, before) and [name for name, _ in host.named_modules()] == names
    assert not hasattr(host, "peft_config") and host._forward_pre_hooks == hooks
    _, refused = attempt(describe_memory, folder)
    assert refused or any(reason in str(error.value) for reason in OTHER_BASE), error.value


@pytest.mark.parametrize(
    ("made_with", "change", "fields", "message"), ATTACKS.values(), ids=list(ATTACKS)
)
def test_a_hostile_memory_is_refused_and_leaves_the_base(
    made_with, change, fields, message, tmp_path
):
    make_model(**made_with).save_pretrained(tmp_path)
    if change is not None:
        rewrite(tmp_path, change)
    change_config(tmp_path, **fields)
    assert_refused(tmp_path, message, make_host("llama"))


# What PEFT's own verbs refuse too: the tensors are compared with the model's own.
CHECKED_BY_THE_TUNER = [
    "other r",
    "not finite",
    "layer missing",
    "layer too many",
    "int8",
    "norm",
    "embedding",
    "weights absurd",
    "product absurd",
    "head of another shape",
    "saved embeddings of another shape",
    "norm as an embedding",
]


@pytest.mark.parametrize("attack", CHECKED_BY_THE_TUNER)
def test_peft_s_own_verbs_check_the_tensors(attack, tmp_path):
    made_with, change, fields, _ = ATTACKS[attack]
    make_model(**made_with).save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    change_config(tmp_path, **fields)
    host = make_host("llama")
    before = snapshot(host)
    with pytest.raises(ValueError, match="^the memory does not fit the model: ") as error:
        PeftModel.from_pretrained(host, tmp_path)
    assert "\n" not in str(error.value)
    after = [tensor for key, tensor in host.state_dict().items() if ".locas_" not in key]
    kept = list(before.values())
    assert all(any(torch.equal(tensor, own) for own in after) for tensor in kept)


def test_a_damaged_file_is_refused(memory):
    path = memory / TENSORS
    for content in (path.read_bytes()[:-40], b"not a memory"):
        path.write_bytes(content)
        assert_refused(memory, "is truncated or not a safetensors file", make_host("llama"))


def test_a_pickle_of_tensors_loads_as_peft_s_own(memory, tmp_path):
    model = make_model().eval()
    model.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    names = {path.name for path in (tmp_path / "pickled").iterdir()}
    assert names == {"adapter_model.bin", CONFIG, "README.md"}
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path / "pickled")
    assert torch.equal(logits(loaded), logits(model))


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "wrap", [lambda payload: payload, lambda payload: {UP: payload}], ids=["alone", "inside"]
)
def test_a_pickle_that_runs_code_is_refused(memory, tmp_path, wrap):
    (memory / TENSORS).unlink()
    torch.save(wrap(Payload(tmp_path / "ran")), memory / "adapter_model.bin")
    assert_refused(
        memory,
        "is damaged or no pickle of tensors alone: save it as safetensors",
        make_host("llama"),
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value",
    [
        7,
        torch.zeros(1).expand(10**6, 10**6),
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
    ],
    ids=["int", "one number of a large shape", "sparse", "meta"],
)
def test_a_pickle_of_other_values_is_refused(memory, value):
    tensors = load_file(memory / TENSORS)
    (memory / TENSORS).unlink()
    torch.save({**tensors, UP: value}, memory / "adapter_model.bin")
    assert_refused(
        memory,
        r"must hold dense tensors, got another value as .*locas_up\.weight",
        make_host("llama"),
    )


def test_a_bad_state_does_not_take_a_memory_out_of_its_model():
    for model in (
        make_model(),
        get_peft_model(make_host("llama"), LocasConfig(r=4, init_weights="random")),
    ):
        before = snapshot(model)
        with pytest.raises(ValueError, match="the file has no"):
            set_peft_model_state_dict(model, {})
        assert same(model, before) and list(model.peft_config) == ["default"]


@pytest.mark.parametrize(
    ("family", "difference"),
    [
        ("qwen3", "model_type 'llama', this base has 'qwen3'"),
        (
            "gpt2",
            "model_type 'llama', this base has 'gpt2', gated True, this base has False, activation",
        ),
    ],
)
def test_memory_of_another_family(memory, family, difference):
    message = rf"this memory was made for another base \({difference}.*\): load the base that it was made for, or make"
    assert_refused(memory, message, make_host(family))


def test_memory_of_another_width_or_depth(memory):
    for field, value, difference in (
        ("hidden_size", 32, "hidden_size 16, this base has 32"),
        ("num_hidden_layers", 3, "ffns 2, this base has 3"),
    ):
        config = make_host("llama").config
        setattr(config, field, value)
        assert_refused(memory, difference, tf.LlamaForCausalLM(config).eval())


def test_a_memory_that_does_not_fit_a_module_beside_it_leaves_the_base(tmp_path):
    make_model(modules_to_save=["lm_head"]).save_pretrained(tmp_path)
    host = make_host("llama")
    host.resize_token_embeddings(70)
    assert_refused(tmp_path, r"lm_head.*weight has shape \[64, 16\], expected \[70, 16\]", host)


def read_record(folder: Path) -> dict:
    return json.loads((folder / CONFIG).read_text())["record"]


def test_embeddings_saved_with_a_memory_are_named_in_its_config(tmp_path):
    model = make_model().eval()
    with torch.no_grad():
        model.get_base_model().model.embed_tokens.weight[5] += 1.0
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    named = read_record(tmp_path)["saved_embeddings"]
    assert sorted(named) == ["lm_head.weight", "model.embed_tokens.weight"]
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(load_memory(make_host("llama"), tmp_path)), logits(model))
    record = read_record(tmp_path)
    change_config(tmp_path, record={**record, "saved_embeddings": ["lm_head.weight"]})
    assert_refused(
        tmp_path, r"model\.embed_tokens\.weight is a weight of the base", make_host("llama")
    )
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert read_record(tmp_path)["saved_embeddings"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": SLOW_PATTERN},
        {"exclude_modules": SLOW_PATTERN},
        {"rank_pattern": {SLOW_PATTERN: 9}},
        {"layers_pattern": [SLOW_PATTERN], "layers_to_transform": [0, 1]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_patterns_of_a_file_are_not_matched(memory, fields):
    change_config(memory, **fields)
    start = time.process_time()
    loaded = load_memory(make_host("llama"), memory)
    loaded.save_pretrained(memory / "again")
    assert time.process_time() - start < 5
    assert torch.equal(logits(loaded), logits(make_model().eval()))
    assert SLOW_PATTERN not in (memory / "again" / CONFIG).read_text()


def test_a_flipped_bit_is_refused_and_a_file_without_a_digest_loads(memory):
    save_memory(make_model(), memory, "base", "card")
    path = memory / TENSORS
    whole, expected = path.read_bytes(), logits(make_model().eval())
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert_refused(
        memory, "holds other tensors than were saved, since its digest differs", make_host("llama")
    )
    path.write_bytes(whole)
    rewrite(memory, lambda tensors: None)  # saved without metadata
    assert torch.equal(logits(load_memory(make_host("llama"), memory)), expected)


def test_the_tensors_of_a_memory_of_the_hub_are_checked(memory, monkeypatch):
    import huggingface_hub
    from peft import config
    from peft.utils import save_and_load

    def download(name, filename, **kwargs):
        return str(memory / filename)

    for module in (huggingface_hub, config, save_and_load):
        monkeypatch.setattr(module, "hf_hub_download", download)
    monkeypatch.setattr(save_and_load, "file_exists", lambda **kwargs: True)
    rewrite(memory, lambda t: t.update({EMBEDDINGS: ones(64, 16)}))
    host = make_host("llama")
    before = snapshot(host)
    with pytest.raises(ValueError, match="embed_tokens.weight is a weight of the base"):
        PeftModel.from_pretrained(host, "somebody/memory")
    after = host.state_dict()
    assert all(
        torch.equal(after[name.replace(".mlp.", ".mlp.base_layer.")], before[name])
        for name in before
    )


def test_transformers_own_loader_makes_no_checks(memory):
    rewrite(memory, lambda t: t.update({EMBEDDINGS: ones(64, 16)}))
    host = make_host("llama")
    host.load_adapter(str(memory))
    assert torch.equal(host.model.embed_tokens.weight, torch.ones(64, 16))  # SECURITY.md says so


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind"
)
def test_unreadable_weights_are_not_called_truncated(memory):
    (memory / TENSORS).chmod(0)
    with pytest.raises(
        ValueError, match=r"cannot be read \(Permission denied\): check the file's permissions$"
    ):
        describe_memory(memory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "NOPE"}, "must name a peft_type that PEFT has, got 'NOPE': update peft$"),
        (
            {"base_model_name_or_path": 5},
            "must name its base by a string, got 5: copy or save the memory again$",
        ),
    ],
)
def test_a_config_of_no_known_adapter_is_refused(memory, fields, message):
    change_config(memory, **fields)
    for look in (describe_memory, lambda folder: load_memory(make_host("llama"), folder)):
        with pytest.raises(ValueError, match=message):
            look(memory)


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.0.self_attn.q_proj.base_layer.weight"]
)
def test_another_adapter_s_file_cannot_replace_weights_of_the_base(tmp_path, name):
    base = make_host("llama")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    load_memory(make_host("llama"), tmp_path)
    shape = (64, 16) if name == "lm_head.weight" else (16, 16)
    save_file({**tensors, f"base_model.model.{name}": torch.zeros(shape)}, tmp_path / TENSORS)
    base = make_host("llama")
    before = snapshot(base)
    with pytest.raises(
        ValueError, match=f"{name} is a weight of the base and no part of the adapter; save it with"
    ):
        load_memory(base, tmp_path)
    assert same(base, before)


def test_another_adapter_that_does_not_fit_leaves_the_base(tmp_path):
    base = make_host("llama")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    model = make_host("gpt2")
    before, names = snapshot(model), [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match="does not fit GPT2LMHeadModel"):
        load_memory(model, tmp_path)
    assert [name for name, _ in model.named_modules()] == names and not hasattr(
        model, "peft_config"
    )
    assert same(model, before)


def test_each_test_that_security_md_names_exists():
    tests = Path(__file__).parent
    named = re.findall(
        r"(test_\w+\.py)::(test_\w+)", (tests.parent / "SECURITY.md").read_text(encoding="utf-8")
    )
    assert len(named) > 15
    for file, name in named:
        assert f"\ndef {name}(" in (tests / file).read_text(encoding="utf-8"), (
            f"{file} has no {name}"
        )
