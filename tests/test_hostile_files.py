"""Memory files of unknown origin: what is changed in them is refused, or it loads soundly.

    pytest tests/test_hostile_files.py                                  # 400 cases
    LOCAS_FUZZ_CASES=100000 pytest tests/test_hostile_files.py -m slow  # 35 minutes of one core

A case that fails is reduced to the fewest and simplest changes that fail, which are printed.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
import struct
import time
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import hypothesis
import pytest
import torch
from families import change_config, logits, make_host, make_model, rewrite, same, snapshot, teach
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from locas_peft import LocasConfig, calibrate
from locas_peft.files import load_json
from locas_peft.memories import describe_memory, load_memory, save_memory
from locas_peft.tuner.modules import remember_modules

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
CASES = 400
LIMIT_SECONDS = 5.0  # of processor time: other processes may slow a test down
TOKENS = torch.arange(3, 27).reshape(2, 12)
# The reasons to refuse a sound file for this base. `describe_memory` too must refuse for others.
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
    # Of a file whose config names another type than LOCAS.
    "is a weight of the base and no part of the adapter",
)


# ------------------------------------------------------------------------------------------ changes

# `choose` draws one of a sequence or of a strategy.

inf, nan = float("inf"), float("nan")
FACTORS = [0.0, -0.0, 1e-45, 1e-30, 1.0, -1.0, 1e4, 1e12, 1e13, 1e20, 3e38, inf, nan]
SLOW_PATTERN = "(.*)*" * 12 + "$!"
STRINGS = [
    "mlp",
    "model.layers.0.mlp",
    "all-linear",
    ".*",
    "CAUSAL_LM",
    "SEQ_2_SEQ_LM",
    "SEQ_CLS",
    "TOKEN_CLS",
]
STRINGS += ["", SLOW_PATTERN, "(" * 9999, "\ud800", "a\nb", "\x1b[2J"]
STRINGS += ["QUESTION_ANS", "LORA", "IA3", "write", "paper"]
NUMBERS = [None, True, False, 0, 1, -1, 3, 10**9, 10**30, 0.5, 1e308, -1e308, 1e12, inf, nan]
LISTS = [[], [0], [5, 6], [-1], [10**9], [[]], [None], ["mlp"], ["lm_head"], ["model.norm"]]
LISTS += [[SLOW_PATTERN], [""]]
OBJECTS = [{}, {"mlp": 3}, {SLOW_PATTERN: 3}, {"embed_tokens": [1]}, {"x": {}}]
OBJECTS += [{"up": "up_proj", "down": "down_proj"}]
VALUES = STRINGS + NUMBERS + LISTS + OBJECTS
OTHER_KEYS = ["cls", "self", "runtime_config", "unknown", "target_parameters", "bias", "\n"]


def change_bytes(choose, folder: Path) -> None:
    path = folder / choose([TENSORS, CONFIG])
    data = bytearray(path.read_bytes())
    for _ in range(choose(range(1, 9))):
        size = choose([2000, len(data)])
        at = choose(range(min(size, len(data))))
        old = choose([0, 1, 4, 4096, len(data)])
        data[at : at + old] = choose(st.binary(max_size=min(old, 100) or 4))
    path.write_bytes(bytes(data))


NO_VALUES = [None, {}, "", 5]
SHAPES = [[], [0], [-1], [10**18], [2**63], [3, 16], [16, 3], [1, 48], [48], ["a"]]
DTYPE_NAMES = ["F32", "F16", "BF16", "F64", "I8", "U8", "I64", "BOOL", "F8_E4M3", "C64", "X"]
FIELDS = {"dtype": DTYPE_NAMES, "shape": SHAPES, "data_offsets": [], "x": []}
METADATA = [{}, {"locas_digest": "x"}, {"a": 1}, None, [], {"format": "tf"}]


def change_header(choose, folder: Path) -> None:
    data = (folder / TENSORS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    key = choose(sorted(header.keys() - {"__metadata__"}))
    entry = header.pop(key)
    kind = choose(["field", "offsets", "name", "missing", "swapped", "metadata"])
    if kind == "field":
        field = choose([*FIELDS])
        entry[field] = choose(FIELDS[field] + NO_VALUES)
    elif kind == "offsets":
        entry["data_offsets"] = [choose(range(-9, 2 * len(rest))) for _ in range(2)]
    elif kind == "name":
        key = choose(["", "a\nb", key.upper(), key + "x", "locas_up.weight", ".locas_tau"])
    elif kind == "swapped":
        other = choose(sorted(header))
        header[other], entry = entry, header[other]
    elif kind == "metadata":
        header["__metadata__"] = choose(METADATA)
    if kind != "missing":
        header[key] = entry
    text = json.dumps(header).encode(errors="surrogatepass")
    size = len(text)
    length = choose([*[size] * 6, 0, 1, size // 2, size + 8, 2**40, 2**63])
    (folder / TENSORS).write_bytes(struct.pack("<Q", length) + text + rest)


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool]
PARTS = [("0", "7"), ("mlp", "self_attn"), ("locas_", "locas_x"), ("model.", ""), ("mlp", "mlp.x")]
TENSOR_KINDS = ["missing", "name", "dtype", "shape", "filled", "scaled", "number", "base"]


def change_tensors(choose, folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    for _ in range(choose([1, 2])):
        key = choose(sorted(tensors))
        tensor = tensors.pop(key)
        name = choose(sorted(base_state()))
        weight = base_state()[name]
        kind = choose(TENSOR_KINDS)
        if kind == "name":
            key = key.replace(*choose(PARTS))
        elif kind == "dtype":
            tensor = tensor.to(choose(DTYPES))
        elif kind == "shape":
            tensor = choose([tensor.T, tensor[None], tensor.flatten()[:1], tensor.new_zeros(0)])
        elif kind == "filled":
            tensor = torch.full_like(tensor.float(), choose(FACTORS))
        elif kind == "scaled":
            tensor = tensor * choose(FACTORS)
        elif kind == "number":
            shape, tensor = tensor.shape, tensor.float().flatten()
            tensor[choose(range(len(tensor)))] = choose(FACTORS)
            tensor = tensor.reshape(shape)
        elif kind == "base":
            name = choose([name, name.replace("mlp.", "mlp.base_layer.")])
            tensors[PREFIX + name] = choose([weight, weight + 1.0, weight * nan, torch.zeros(3)])
        if kind != "missing":
            tensors[key] = tensor
    tensors = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
    if choose(range(10)) == 9:
        torch.save(tensors, folder / "adapter_model.bin")
        (folder / TENSORS).unlink()
    else:
        save_file(tensors, folder / TENSORS)


NO_CONFIGS = ["[" * 100_000, "[]", "null", "5", "", '"x"', "{" + '"a":{' * 20_000, "{"]


def change_config_file(choose, folder: Path) -> None:
    config = load_json(folder / CONFIG)
    for _ in range(choose(range(1, 5))):
        # The values are shared by all cases.
        config = copy.deepcopy(config)
        name = choose(sorted(config))
        kind = choose(range(10))
        if kind == 9:
            config.pop(name)
        elif kind == 8:
            config[choose(OTHER_KEYS)] = choose(VALUES)
        elif kind == 7:
            record = config["record"]
            changed = choose([record, record["host"]])
            changed[choose([*changed, "slots", "saved_embeddings", "a\nb"])] = choose(VALUES)
        elif kind == 6:
            # Sound for a base with such layers.
            config["layers_to_transform"] = choose([[0], [1], [0, 1], [0, 1, 2], [2], [1, 1]])
        else:
            config[name] = choose(VALUES)
    text = json.dumps(config)
    if choose(range(30)) == 29:
        text = choose(NO_CONFIGS)
    (folder / CONFIG).write_text(text, encoding="utf-8")


CHANGES = [change_bytes, change_header, change_tensors, change_config_file]
# A change may not apply to what an earlier one has damaged.
DAMAGED = (ValueError, LookupError, OSError, RuntimeError, TypeError, AttributeError)
DAMAGED += (SafetensorError, struct.error)


# -------------------------------------------------------------------------------------------- cases


def make_base():
    return make_host("qwen3").requires_grad_(False)


@functools.cache
def base_state() -> dict[str, torch.Tensor]:
    return make_base().state_dict()


@pytest.fixture(scope="module")
def memories(tmp_path_factory) -> list[Path]:
    """A memory that has learned, one with modules beside it, an empty one, and one with gains."""
    folder = tmp_path_factory.mktemp("memories")
    beside = {"modules_to_save": ["model.norm"], "trainable_token_indices": [5, 6]}
    kinds = {"plain": {}, "beside": beside, "empty": {}, "gains": {"gains": True}}
    for name, fields in kinds.items():
        model = get_peft_model(make_base(), LocasConfig(r=3, task_type="CAUSAL_LM", **fields))
        if name != "empty":
            calibrate(model, [TOKENS])
            teach(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder / name)
    return [folder / name for name in kinds]


def attempt(load, *args):
    """Return a function's result and None, or None and its ValueError."""
    try:
        return load(*args), None
    except ValueError as error:
        assert str(error) and "\n" not in str(error), str(error)
        return None, error


def describe(base) -> list:
    """All of a model but its weights that a refused memory could leave behind."""
    modules = [(name, type(module)) for name, module in base.named_modules()]
    flags = [parameter.requires_grad for parameter in base.parameters()]
    return [modules, flags, dict(base._forward_pre_hooks), hasattr(base, "peft_config")]


@contextmanager
def unchanged(base):
    """Assert at the end that a base is as it was."""
    weights, others = snapshot(base), describe(base)
    yield
    assert describe(base) == others
    assert same(base, weights)


def assert_both_refuse(described, error) -> None:
    """`describe_memory` refuses too, unless the file is sound for another base."""
    is_other_base = any(reason in str(error) for reason in OTHER_BASE)
    assert described is not None or is_other_base, f"describe_memory accepts: {error}"


def run_case(memories: list[Path], base, draw, folder: Path) -> str:
    """Change a memory, describe it, load it, and return what happened."""

    def choose(options):
        is_strategy = isinstance(options, st.SearchStrategy)
        return draw(options if is_strategy else st.sampled_from(options))

    shutil.copytree(choose(memories), folder)
    for change in choose(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=2)):
        with suppress(*DAMAGED):
            change(choose, folder)
    restore = remember_modules(base)
    start = time.process_time()
    with unchanged(base):
        _, described = attempt(describe_memory, folder)
        loaded, error = attempt(load_memory, base, folder)
        if error is None:
            assert described is None, f"describe_memory refuses a memory that loads: {described}"
            with torch.no_grad():
                output = loaded.eval()(input_ids=TOKENS)
            assert output.logits.isfinite().all()
            if not loaded.peft_config["default"].modules_to_save:
                loaded.unload()
            restore()  # PEFT's unload leaves fully trained modules in the model
    assert time.process_time() - start < LIMIT_SECONDS
    if error is None:
        return "loaded"
    assert_both_refuse(described, error)
    return "refused" if described else "refused for this base"


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
    # A loader that refuses everything would pass the checks of a case.
    least = Counter({"refused": 101, "loaded": 21, "refused for this base": 3})
    assert outcomes >= least


@pytest.mark.slow
def test_more_changed_memories_are_refused_or_sound(memories, tmp_path):
    run_cases(memories, tmp_path, int(os.environ.get("LOCAS_FUZZ_CASES", 2000)))


def test_memories_without_a_change_load(memories):
    base = make_base()
    expected = base(input_ids=TOKENS).logits
    for memory in memories:
        has_learned = memory.name != "empty"
        assert describe_memory(memory)["learned"] is has_learned
        loaded = load_memory(base, memory)
        assert torch.equal(loaded(input_ids=TOKENS).logits, expected) is not has_learned
        loaded.unload()


# ------------------------------------------------------------------------------------ known attacks

UP = f"{PREFIX}model.layers.1.mlp.locas_up.weight"
HEAD, EMBEDDINGS = f"{PREFIX}lm_head.weight", f"{PREFIX}model.embed_tokens.weight"
NORM = f"{PREFIX}model.norm.weight"
SAVED = {"modules_to_save": ["lm_head"]}
NAMED = {"record": {"saved_embeddings": ["model.embed_tokens.weight"]}}
TOKEN_INDICES = {"trainable_token_indices": [5, 6]}
FOREIGN = "is a weight of the base and no part of a memory"
NO_FLOAT = "is of torch.int8, a floating dtype of 16 bits or more expected"
NOT_FINITE = "holds values that are not finite"
SAVE_AGAIN = "adapter_config.json .*: copy or save the memory again$"


def put(key: str, tensor: torch.Tensor):
    """Return a change that puts a tensor into a file."""
    return lambda tensors: tensors.update({key: tensor})


def scale(factor: float, *parts: str):
    """Return a change that multiplies parts of one layer."""
    return lambda tensors: [tensors[UP.replace("locas_up.weight", p)].mul_(factor) for p in parts]


def without_layer_1(tensors):
    for key in [key for key in tensors if "layers.1" in key]:
        del tensors[key]


def as_layer_2(tensors):
    for key in [key for key in tensors if "layers.1" in key]:
        tensors[key.replace("layers.1", "layers.2")] = tensors[key].clone()


def without_prefix(tensors):
    for key in list(tensors):
        tensors[key.removeprefix(PREFIX)] = tensors.pop(key)


ones, int8 = torch.ones, torch.ones(64, 16, dtype=torch.int8)
ROWS, NO_ROWS = ones(64, 16), ones(64, 16) * torch.nan
# What is wrong: the change of the memory's tensors, and the refusal.
CHANGED = {
    "part missing": (
        lambda t: t.pop(UP),
        "at model.layers.1.mlp: locas_up is missing. Save the memory",
    ),
    "other r": (put(UP, ones(5, 16)), r"locas_up has shape \[5, 16\], expected \[4, 16\]"),
    "other D": (put(UP, ones(4, 8)), r"locas_up has shape \[4, 8\], expected \[4, 16\]"),
    "not finite": (scale(torch.inf, "locas_up.weight"), rf"locas_up\.weight {NOT_FINITE}"),
    "layer missing": (without_layer_1, r"the file has no .*layers.1.mlp.locas_"),
    "layer too many": (as_layer_2, r"the model has no layer for .*layers.2.mlp.locas_"),
    "empty": (lambda t: t.clear(), "holds no LOCAS memory"),
    "int8": (put(UP, int8[:4]), NO_FLOAT),
    "float8": (
        put(UP, ones(4, 16).to(torch.float8_e4m3fn)),
        "is of torch.float8_e4m3fn, a floating dtype",
    ),
    "without PEFT's prefix": (
        without_prefix,
        r"model\.layers\.0\.mlp\.\S+ must start with 'base_model\.model\.', as PEFT",
    ),
    "norm": (put(NORM, ones(16)), rf"norm\.weight {FOREIGN}"),
    "wrapped": (
        put(UP.replace("locas_up", "base_layer.up_proj"), ones(24, 16)),
        rf"base_layer\.up_proj\.weight {FOREIGN}",
    ),
    "embedding": (put(EMBEDDINGS, ROWS), rf"embed_tokens\.weight {FOREIGN}"),
    "embedding not finite": (put(EMBEDDINGS, NO_ROWS), rf"embed_tokens\.weight {NOT_FINITE}"),
    "head": (put(HEAD, ROWS), rf"lm_head\.weight {FOREIGN}; get the file from a trusted source"),
    "head int8": (put(HEAD, int8), rf"lm_head\.weight {FOREIGN}"),
    "no tensor's name": (
        put(f"{PREFIX}nonsense\nweight", ones(1)),
        rf"nonsense\\nweight {FOREIGN}",
    ),
    "weights absurd": (
        scale(1e20, "locas_up.weight"),
        r"locas_up\.weight holds [\d.]+e\+\d+, at most 1e\+12",
    ),
    "tau absurd": (scale(1e37, "locas_tau"), r"locas_tau holds [\d.]+e\+37, at most 1e\+12"),
    "product absurd": (
        scale(1e6, "locas_tau", "locas_input_scale"),
        r"at model.layers.1.mlp: the product of its largest numbers is \d",
    ),
}
# What is wrong: fields of the config, and the refusal.
CONFIGURED = {
    "no parts": ({"ffn_parts": {}}, "ffn_parts must name down and either up"),
    "parts": ({"ffn_parts": {"up": "a", "down": "b"}}, "."),
    "r of a billion": (
        {"r": 10**9, "init_weights": "gaussian"},
        "its config at model.layers.0.mlp: ",
    ),
    "scaling absurd": (
        {"scaling": 1e308},
        r"scaling must be finite, at most 1e12 in size, got 1e\+308",
    ),
    "scaling of many digits": ({"scaling": 10**30}, f"scaling must be finite, .*, got {10**30}"),
    "product with scaling": ({"scaling": 1e12}, "the product of its largest numbers is"),
    "clip": ({"max_slot_norm": inf}, "max_slot_norm must be finite and above 0, .*, got inf"),
    "tokens": (
        {"trainable_token_indices": 0},
        "trainable_token_indices must be a list of token ids, ",
    ),
    "no token": (
        {"trainable_token_indices": [1]},
        "no tensor is for trainable_token_indices. Save",
    ),
    "no module": (SAVED, "no tensor is for modules_to_save. Save the memory again."),
    "no embedding": (
        {"record": {"saved_embeddings": ["lm_head.weight"]}},
        "no tensor is for saved_embeddings",
    ),
    "slow modules": ({"modules_to_save": [SLOW_PATTERN]}, "modules_to_save must be names, got"),
    "task": (
        {"task_type": "SEQ_2_SEQ_LM"},
        "task_type 'SEQ_2_SEQ_LM', which LlamaForCausalLM cannot do",
    ),
    "task of two lines": ({"task_type": "a\nb"}, r"Invalid task type: 'a\\nb'"),
    "deep pattern": (
        {"target_modules": "(" * 10_000},
        "target_modules must be a regular expression",
    ),
    "field of Python": ({"cls": 1}, SAVE_AGAIN),
    "self": ({"self": 1}, SAVE_AGAIN),
    "no type of PEFT's": (
        {"peft_type": "NOPE"},
        "must name a peft_type that PEFT has, got 'NOPE': update peft$",
    ),
    "base of a number": (
        {"base_model_name_or_path": 5},
        "must name its base by a string, got 5: copy or save",
    ),
}
# With modules beside the memory: fields that it is made with, both changes, and the refusal.
BESIDE = {
    "not finite beside modules": (
        SAVED | TOKEN_INDICES,
        scale(torch.nan, "locas_up.weight"),
        {},
        NOT_FINITE,
    ),
    "head without PEFT's prefix": (
        SAVED,
        lambda t: t.update({"lm_head.weight": t.pop(HEAD)}),
        {},
        r"lm_head\.weight must start with",
    ),
    "head missing": (SAVED, lambda t: t.pop(HEAD), {}, "no tensor is for modules_to_save"),
    "head of another shape": (
        SAVED,
        put(HEAD, ones(64, 8)),
        {},
        r"lm_head.*weight has shape \[64, 8\], expected \[64, 16\]",
    ),
    "trained head int8": (SAVED, put(HEAD, int8), {}, rf"lm_head.*weight {NO_FLOAT}"),
    "original head": (
        SAVED,
        put(HEAD.replace("head", "head.original_module"), ROWS),
        {},
        rf"lm_head\.original_module\.weight {FOREIGN}",
    ),
    "head of another name": (
        SAVED,
        lambda t: t.update({HEAD.replace("weight", "bias"): t.pop(HEAD)}),
        {},
        r"the file has no base_model\.model\.lm_head\.weight",
    ),
    "more tokens than in the file": (
        TOKEN_INDICES,
        None,
        {"trainable_token_indices": [5, 6, 7]},
        r"trainable_tokens_delta.* has shape \[2, 16\], expected \[3, 16\]",
    ),
    "saved embeddings of another shape": (
        {},
        put(EMBEDDINGS, ones(64, 8)),
        NAMED,
        r"embed_tokens\.weight has shape \[64, 8\], expected \[64, 16\]",
    ),
    "saved embeddings int8": (
        {},
        put(EMBEDDINGS, int8),
        NAMED,
        rf"embed_tokens\.weight {NO_FLOAT}",
    ),
    "saved embeddings not finite": (
        {},
        put(EMBEDDINGS, NO_ROWS),
        NAMED,
        rf"embed_tokens\.weight {NOT_FINITE}",
    ),
    "norm as an embedding": (
        {},
        put(NORM, ones(16)),
        {"record": {"saved_embeddings": ["model.norm.weight"]}},
        rf"model\.norm\.weight {FOREIGN}",
    ),
}
for indices in ([10**9], [64], {"embed_tokens": [5, 64]}):
    message = r"trainable_token_indices must be below the 64 rows of model.embed_tokens, got \d+"
    fields = {"trainable_token_indices": indices}
    BESIDE[f"tokens {indices}"] = (TOKEN_INDICES, None, fields, message)
for task in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"):
    fields = {"task_type": task}
    BESIDE[f"norm beside {task}"] = (
        {},
        put(NORM, ones(16)),
        fields,
        rf"model\.norm\.weight {FOREIGN}",
    )
ATTACKS = {
    **{name: ({}, change, {}, refusal) for name, (change, refusal) in CHANGED.items()},
    **{name: ({}, None, fields, refusal) for name, (fields, refusal) in CONFIGURED.items()},
    **BESIDE,
}


@pytest.fixture
def memory(tmp_path):
    make_model().save_pretrained(tmp_path)
    return tmp_path


def save_attack(folder, made_with, change, fields):
    make_model(**made_with).save_pretrained(folder)
    if change is not None:
        rewrite(folder, change)
    change_config(folder, **fields)


def assert_refused(folder, message, host=None):
    """Loading refuses in one line, and the host is as it was."""
    if host is None:
        host = make_host("llama")
    with unchanged(host), pytest.raises(ValueError, match=message) as error:
        load_memory(host, folder)
    assert "\n" not in str(error.value)
    _, described = attempt(describe_memory, folder)
    assert_both_refuse(described, error.value)


@pytest.mark.parametrize(
    ("made_with", "change", "fields", "message"), ATTACKS.values(), ids=list(ATTACKS)
)
def test_a_hostile_memory_is_refused_and_leaves_the_base(
    made_with, change, fields, message, tmp_path
):
    save_attack(tmp_path, made_with, change, fields)
    assert_refused(tmp_path, message)


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


def assert_weights_kept(host, before) -> None:
    """PEFT's own verbs leave an empty memory in the model, which renames weights."""
    after = [tensor for key, tensor in host.state_dict().items() if ".locas_" not in key]
    for tensor in before.values():
        assert any(torch.equal(tensor, own) for own in after)


@pytest.mark.parametrize("attack", CHECKED_BY_THE_TUNER)
def test_peft_s_own_verbs_check_the_tensors(attack, tmp_path):
    save_attack(tmp_path, *ATTACKS[attack][:3])
    host = make_host("llama")
    before = snapshot(host)
    with pytest.raises(ValueError, match="^the memory does not fit the model: ") as error:
        PeftModel.from_pretrained(host, tmp_path)
    assert "\n" not in str(error.value)
    assert_weights_kept(host, before)


def test_a_damaged_file_is_refused(memory):
    path = memory / TENSORS
    for content in (path.read_bytes()[:-40], b"not a memory"):
        path.write_bytes(content)
        assert_refused(memory, "is truncated or not a safetensors file")


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_pickle_that_runs_code_is_refused(memory, tmp_path, is_inside):
    (memory / TENSORS).unlink()
    payload = Payload(tmp_path / "ran")
    torch.save({UP: payload} if is_inside else payload, memory / "adapter_model.bin")
    assert_refused(memory, "is damaged or no pickle of tensors alone: save it as safetensors")
    assert not (tmp_path / "ran").exists()


OTHER_VALUES = {
    "int": 7,
    "one number of a large shape": torch.zeros(1).expand(10**6, 10**6),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.zeros(3, device="meta"),
}


@pytest.mark.parametrize("value", OTHER_VALUES.values(), ids=list(OTHER_VALUES))
def test_a_pickle_of_other_values_is_refused(memory, value):
    tensors = load_file(memory / TENSORS)
    (memory / TENSORS).unlink()
    torch.save({**tensors, UP: value}, memory / "adapter_model.bin")
    assert_refused(memory, r"must hold dense tensors, got another value as .*locas_up\.weight")


def test_a_bad_state_does_not_take_a_memory_out_of_its_model():
    fresh = get_peft_model(make_host("llama"), LocasConfig(r=4, init_weights="random"))
    for model in (make_model(), fresh):
        before = snapshot(model)
        with pytest.raises(ValueError, match="the file has no"):
            set_peft_model_state_dict(model, {})
        assert same(model, before) and list(model.peft_config) == ["default"]


OF_GPT2 = "model_type 'llama', this base has 'gpt2', gated True, this base has False, activation"


@pytest.mark.parametrize(
    ("family", "fields", "difference"),
    [
        ("qwen3", {}, "model_type 'llama', this base has 'qwen3'"),
        ("gpt2", {}, OF_GPT2),
        ("llama", {"hidden_size": 32}, "hidden_size 16, this base has 32"),
        ("llama", {"num_hidden_layers": 3}, "ffns 2, this base has 3"),
    ],
)
def test_a_memory_of_another_base_is_refused(memory, family, fields, difference):
    config = make_host(family).config
    config.update(fields)
    message = rf"this memory was made for another base \(.*{difference}.*\): load the base that it"
    assert_refused(memory, message, AutoModelForCausalLM.from_config(config).eval())


def test_a_memory_that_does_not_fit_a_module_beside_it_leaves_the_base(tmp_path):
    make_model(**SAVED).save_pretrained(tmp_path)
    host = make_host("llama")
    host.resize_token_embeddings(70)
    assert_refused(tmp_path, r"lm_head.*weight has shape \[64, 16\], expected \[70, 16\]", host)


def test_embeddings_saved_with_a_memory_are_named_in_its_config(tmp_path):
    model = make_model().eval()
    with torch.no_grad():
        model.get_base_model().model.embed_tokens.weight[5] += 1.0
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    record = load_json(tmp_path / CONFIG)["record"]
    assert sorted(record["saved_embeddings"]) == ["lm_head.weight", "model.embed_tokens.weight"]
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    change_config(tmp_path, record={**record, "saved_embeddings": ["lm_head.weight"]})
    assert_refused(tmp_path, r"model\.embed_tokens\.weight is a weight of the base")
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert load_json(tmp_path / CONFIG)["record"]["saved_embeddings"] is None


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
    assert time.process_time() - start < LIMIT_SECONDS
    assert torch.equal(logits(loaded), logits(make_model().eval()))
    assert SLOW_PATTERN not in (memory / "again" / CONFIG).read_text()


def test_a_flipped_bit_is_refused_and_a_file_without_a_digest_loads(memory):
    save_memory(make_model(), memory, "base", "card")
    path = memory / TENSORS
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert_refused(memory, "holds other tensors than were saved, since its digest differs")
    path.write_bytes(whole)
    # Saved without metadata.
    rewrite(memory, lambda tensors: None)
    load_memory(make_host("llama"), memory)


def test_the_tensors_of_a_memory_of_the_hub_are_checked(memory, monkeypatch):
    import huggingface_hub
    from peft import config
    from peft.utils import save_and_load

    def download(name, filename, **kwargs):
        return str(memory / filename)

    for module in (huggingface_hub, config, save_and_load):
        monkeypatch.setattr(module, "hf_hub_download", download)
    monkeypatch.setattr(save_and_load, "file_exists", lambda **kwargs: True)
    rewrite(memory, put(EMBEDDINGS, ROWS))
    host = make_host("llama")
    before = snapshot(host)
    with pytest.raises(ValueError, match="embed_tokens.weight is a weight of the base"):
        PeftModel.from_pretrained(host, "somebody/memory")
    assert_weights_kept(host, before)


def test_transformers_own_loader_makes_no_checks(memory):
    rewrite(memory, put(EMBEDDINGS, ROWS))
    host = make_host("llama")
    host.load_adapter(str(memory))
    assert torch.equal(host.model.embed_tokens.weight, ROWS)  # SECURITY.md says so


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind"
)
def test_unreadable_weights_are_not_called_truncated(memory):
    (memory / TENSORS).chmod(0)
    message = r"cannot be read \(Permission denied\): check the file's permissions$"
    with pytest.raises(ValueError, match=message):
        describe_memory(memory)


@pytest.fixture
def lora(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(make_host("llama"), config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lm_head.weight", (64, 16)),
        ("model.layers.0.self_attn.q_proj.base_layer.weight", (16, 16)),
    ],
)
def test_another_adapter_s_file_cannot_replace_weights_of_the_base(lora, name, shape):
    load_memory(make_host("llama"), lora)
    rewrite(lora, put(f"{PREFIX}{name}", torch.zeros(shape)))
    message = f"{name} is a weight of the base and no part of the adapter; save it with"
    base = make_host("llama")
    with unchanged(base), pytest.raises(ValueError, match=message):
        load_memory(base, lora)


def test_another_adapter_that_does_not_fit_leaves_the_base(lora):
    base = make_host("gpt2")
    with unchanged(base), pytest.raises(ValueError, match="does not fit GPT2LMHeadModel"):
        load_memory(base, lora)


def test_each_test_that_security_md_names_exists():
    tests = Path(__file__).parent
    security = (tests.parent / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", security)
    assert len(named) > 15
    for file, name in named:
        source = (tests / file).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in source, f"{file} has no {name}"
