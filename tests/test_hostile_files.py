"""Memory files of unknown origin: random changes of bytes, headers, tensors and configs are refused or load soundly.

    pytest tests/test_hostile_files.py                                     # 240 cases
    LOCAS_FUZZ_CASES=100000 pytest tests/test_hostile_files.py -m slow     # 13 minutes of one core; 2,000 if not set

A case is a seed: `run_case(memories, base, 17)` repeats the case 17 alone.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
import struct
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from families import make_host
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from locas_peft import LocasConfig, calibrate
from locas_peft.memories.loading import describe_memory, load_memory
from locas_peft.tuner.modes import remember_modules

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CASES = 240
LIMIT_SECONDS = 5.0  # of processor time: other processes may slow a test down
TOKENS = torch.arange(3, 27).reshape(2, 12)
# The reasons to refuse a sound file for this base. For any other reason `describe_memory` must refuse it too.
OTHER_BASE = (
    "made for another base",
    "does not fit the model",
    "does not fit Qwen3ForCausalLM",
    "cannot do: load the base",
    "must be below the",
    "no FFN of a known structure",
    "which is no FFN",
    "has no projection named",
    "computes something other than",
    "ffn_parts must name",
    "variant 'mlp' needs two-layer FFNs",
    "needs a two-layer memory",
    "host's width where slots are cloned",
    "Target modules",
    "No modules were targeted",
    "All modules were excluded",
    "You are trying to target a module",
    "already marked to be trained fully",
    "activation",
)


# ---------------------------------------------------------------------------------------------------------- changes


def random_number(rng: random.Random) -> float:
    return rng.choice([0.0, -0.0, 1e-45, 1e-30, 1.0, -1.0, 1e4, 1e12, 1e13, 1e20, 3e38, float("inf"), float("nan")])


SLOW_PATTERN = "(.*)*" * 12 + "$!"
STRINGS = ["", "mlp", "model.layers.0.mlp", "all-linear", ".*", SLOW_PATTERN, "(" * 9999, "\ud800", "a\nb", "\x1b[2J"]
STRINGS += "CAUSAL_LM SEQ_2_SEQ_LM SEQ_CLS TOKEN_CLS QUESTION_ANS LORA IA3 write paper".split()
NUMBERS = [None, True, False, 0, 1, -1, 3, 10**9, 10**30, 0.5, 1e308, -1e308, 1e12, float("inf"), float("nan")]
LISTS = [[], [0], [5, 6], [-1], [10**9], [[]], [None], ["mlp"], ["lm_head"], ["model.norm"], [SLOW_PATTERN], [""]]
OBJECTS = [{}, {"mlp": 3}, {SLOW_PATTERN: 3}, {"embed_tokens": [1]}, {"x": {}}, {"up": "up_proj", "down": "down_proj"}]
VALUES = STRINGS + NUMBERS + LISTS + OBJECTS
OTHER_KEYS = ("cls", "self", "runtime_config", "unknown", "target_parameters", "bias", "\n")


def change_bytes(rng: random.Random, folder: Path) -> None:
    path = folder / rng.choice([TENSORS, TENSORS, CONFIG])
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 2000))
        kind = rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            del data[at : at + rng.choice([1, 4, 4096])]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.choice([1, 4, 100]))
        else:
            del data[at:]
        if not data:
            break
    path.write_bytes(bytes(data))


def change_header(rng: random.Random, folder: Path) -> None:
    data = (folder / TENSORS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    key = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[key]
    kind = rng.randrange(8)
    if kind == 0:
        entry["dtype"] = rng.choice("F32 F16 BF16 F64 I8 U8 I64 BOOL F8_E4M3 C64 X".split())
    elif kind == 1:
        shapes = [[], [0], [-1], [10**18], [2**63], [3, 16], [16, 3], [1, 48], [48], ["a"], None]
        entry["shape"] = rng.choice(shapes)
    elif kind == 2:
        entry["data_offsets"] = [rng.randrange(-9, len(rest) + 9), rng.randrange(-9, 2 * len(rest))]
    elif kind == 3:
        header[rng.choice(["", "a\nb", key.upper(), key + "x", "locas_up.weight", ".locas_tau"])] = header.pop(key)
    elif kind == 4:
        del header[key]
    elif kind == 5:
        other = rng.choice([key for key in header if key != "__metadata__"])
        header[key], header[other] = header[other], header[key]
    elif kind == 6:
        header["__metadata__"] = rng.choice([{}, {"locas_digest": "x"}, {"a": 1}, None, [], {"format": "tf"}])
    else:
        entry[rng.choice(["dtype", "shape", "data_offsets", "x"])] = rng.choice([None, {}, "", 5])
    if rng.random() < 0.5 and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"].pop("locas_digest", None)
    text = json.dumps(header).encode(errors="surrogatepass")
    length = len(text) if rng.random() < 0.9 else rng.choice([0, 1, len(text) // 2, len(text) + 8, 2**40, 2**63])
    (folder / TENSORS).write_bytes(struct.pack("<Q", length) + text + rest)


def change_tensors(rng: random.Random, folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    base = base_state()
    for _ in range(rng.choice([1, 1, 2])):
        key = rng.choice(sorted(tensors))
        tensor, kind = tensors[key], rng.randrange(9)
        if kind == 0:
            tensors.pop(key)
        elif kind == 1:
            tensors[key] = torch.full_like(tensor.float(), random_number(rng))
        elif kind == 2:
            tensors[key] = tensor * random_number(rng)
        elif kind == 3:
            dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool]
            tensors[key] = tensor.to(rng.choice(dtypes))
        elif kind == 4:
            others = [tensor.T, tensor[None], tensor.reshape(-1)[:1], tensor.new_zeros(0)]
            tensors[key] = rng.choice(others).contiguous()
        elif kind == 5:
            name = rng.choice(sorted(base))
            tensors[f"base_model.model.{name}"] = base[name] + rng.choice([0.0, 1.0, float("nan")])
        elif kind == 6:
            names = [("0", "7"), ("mlp", "self_attn"), ("locas_", "locas_x"), ("model.", ""), ("mlp", "mlp.x")]
            renamed = rng.choice(names)
            tensors[key.replace(*renamed)] = tensors.pop(key)
        elif kind == 7:
            name = rng.choice(sorted(base)).replace("mlp.", "mlp.base_layer.")
            tensors[f"base_model.model.{name}"] = torch.zeros(3)
        else:
            flat = tensor.clone().reshape(-1)
            if len(flat):
                flat[rng.randrange(len(flat))] = random_number(rng) if flat.is_floating_point() else 1
            tensors[key] = flat.reshape(tensor.shape)
        if not tensors:
            break
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    if rng.random() < 0.1:
        torch.save(tensors, folder / "adapter_model.bin")
        (folder / TENSORS).unlink()
    else:
        save_file(tensors, folder / TENSORS)


def change_config(rng: random.Random, folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    for _ in range(rng.choice([1, 1, 2, 4])):
        name, kind = rng.choice(sorted(config)), rng.randrange(10)
        if kind == 0:
            config.pop(name)
        elif kind == 1:
            config[rng.choice(OTHER_KEYS)] = rng.choice(VALUES)
        elif kind == 2 and isinstance(config.get("host"), dict) and config["host"]:
            config["host"][rng.choice([*sorted(config["host"]), "a\nb"])] = rng.choice(VALUES)
        else:
            config[name] = rng.choice(VALUES)
        if not config:
            break
    text = json.dumps(config)
    if rng.random() < 0.03:
        text = rng.choice(["[" * 100_000, "[]", "null", "5", "", '"x"', "{" + '"a":{' * 20_000, text[:-1]])
    (folder / CONFIG).write_text(text, encoding="utf-8")


CHANGES = (change_bytes, change_header, change_tensors, change_config)


# ------------------------------------------------------------------------------------------------------------ cases


def make_base():
    return make_host("qwen3").requires_grad_(False)


@functools.cache
def base_state() -> dict[str, torch.Tensor]:
    return make_base().state_dict()


@pytest.fixture(scope="module")
def base():
    return make_base()


@pytest.fixture(scope="module")
def memories(tmp_path_factory) -> list[Path]:
    """A memory that has learned, one with other trained modules beside it, and an empty one."""
    folder = tmp_path_factory.mktemp("memories")
    beside = {"modules_to_save": ["model.norm"], "trainable_token_indices": [5, 6]}
    for name, fields in (("plain", {}), ("beside", beside), ("empty", {})):
        model = get_peft_model(make_base(), LocasConfig(r=3, task_type="CAUSAL_LM", **fields))
        if name != "empty":
            calibrate(model, [TOKENS])
            for key, parameter in model.named_parameters():
                if "locas_down" in key:
                    parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder / name)
    return [folder / "plain", folder / "beside", folder / "empty"]


def attempt(load, *args):
    """Return a function's result and None, or None and its ValueError."""
    try:
        return load(*args), None
    except ValueError as error:
        assert "\n" not in str(error), str(error)
        assert str(error)
        return None, error


def names_locas(folder: Path) -> bool:
    """Return whether PEFT itself can read the config and finds the type LOCAS in it."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("peft_type") == "LOCAS"


def run_case(memories: list[Path], base, seed: int, folder: Path) -> str:
    """Change a memory, describe it, load it, and return what happened."""
    rng = random.Random(f"hostile {seed}")
    shutil.copytree(rng.choice(memories), folder)
    for _ in range(rng.choice([1, 1, 1, 2])):
        try:
            rng.choice(CHANGES)(rng, folder)
        except (
            ValueError,
            KeyError,
            IndexError,
            OSError,
            RuntimeError,
            TypeError,
            struct.error,
        ):  # damaged by the first change
            pass
        except Exception as error:
            if type(error).__name__ != "SafetensorError":
                raise
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    modules = [(name, type(module)) for name, module in base.named_modules()]
    restore = remember_modules(base)
    start = time.process_time()
    described, refused = attempt(describe_memory, folder)
    direct = names_locas(folder) and rng.random() < 0.5
    loaded, error = attempt(PeftModel.from_pretrained, base, folder) if direct else attempt(load_memory, base, folder)
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
        assert any(reason in str(error) for reason in OTHER_BASE), f"describe_memory accepts: {error}"
        outcome = "refused for this base"
    assert time.process_time() - start < LIMIT_SECONDS
    assert [(name, type(module)) for name, module in base.named_modules()] == modules
    after = base.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not hasattr(base, "peft_config") and not base._forward_pre_hooks
    assert not any(parameter.requires_grad for parameter in base.parameters())
    return outcome


def run_cases(memories, base, seeds, folder: Path) -> Counter:
    outcomes, failures = Counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            case = folder / str(seed)
            try:
                outcomes[run_case(memories, base, seed, case)] += 1
            except Exception as error:
                failures.append(f"case {seed}: {type(error).__name__}: {str(error)[:300]}")
                base = make_base()
            shutil.rmtree(case, ignore_errors=True)
    print(dict(outcomes), f"{len(failures)} failures")
    assert not failures, "\n".join(failures[:40])
    return outcomes


def test_changed_memories_are_refused_or_sound(memories, base, tmp_path):
    outcomes = run_cases(memories, base, range(CASES), tmp_path)
    # The changes must reach every outcome: a loader that refuses everything would pass the checks of a case.
    assert outcomes["refused"] > 100 and outcomes["loaded"] > 20 and outcomes["refused for this base"] > 2


@pytest.mark.slow
def test_more_changed_memories_are_refused_or_sound(memories, base, tmp_path):
    run_cases(memories, base, range(CASES, CASES + int(os.environ.get("LOCAS_FUZZ_CASES", 2000))), tmp_path)


def test_memories_without_a_change_load(memories, base):
    for memory in memories:
        assert describe_memory(memory)["learned"] is (memory.name != "empty")
        loaded = load_memory(base, memory)
        different = not torch.equal(loaded(input_ids=TOKENS).logits, make_base()(input_ids=TOKENS).logits)
        assert different is (memory.name != "empty")
        loaded.unload()


def test_each_test_that_security_md_names_exists():
    tests = Path(__file__).parent
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", (tests.parent / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) > 15
    for file, name in named:
        assert f"\ndef {name}(" in (tests / file).read_text(encoding="utf-8"), f"{file} has no {name}"
