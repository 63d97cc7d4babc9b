"""Models out of GGUF files."""

import copy
import functools
import logging
import shutil

import numpy
import pytest
import torch
from huggingface_hub import cached_assets_path
from peft import get_peft_model

from locas_command import program as cli
from locas_peft import LocasConfig, TestTimeTrainer, demo, files
from locas_peft.asking import Answerer
from locas_peft.bases import gguf as gguf_models
from locas_peft.bases.gguf import find_gguf, is_installed, load_gguf
from locas_peft.bases.loading import load_base
from locas_peft.memories.loading import load_memory
from locas_peft.stages import Place, ReadSettings, read
from locas_peft.text import tokenize

CPU = torch.device("cpu")
TOKENS = torch.arange(40).unsqueeze(0)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def path(tmp_path):
    """A GGUF file."""
    pytest.importorskip("gguf")
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """Keep checkpoints in an empty folder of the test's own; return it."""
    folder = tmp_path / "assets"
    monkeypatch.setattr(
        files, "cached_assets_path", functools.partial(cached_assets_path, assets_dir=folder)
    )
    return folder


def find_checkpoints(assets) -> list:
    return list(assets.glob("locas_peft/gguf/*/checkpoint"))


@pytest.fixture
def converted(monkeypatch):
    """Return a list that grows by a file's name each time that a file itself is loaded."""
    names, convert = [], gguf_models._convert

    def counting(path, dtype):
        names.append(path.name)
        return convert(path, dtype)

    monkeypatch.setattr(gguf_models, "_convert", counting)
    return names


def write_gguf(path, architecture: str = "llama"):
    """Write a Llama of one layer with random weights and a tokenizer of bytes; return the path."""
    from gguf import GGUFWriter
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet()), "th"]
    writer = GGUFWriter(path, architecture)
    rng = numpy.random.default_rng(0)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.no_grad()
def logits(model, ids: torch.Tensor = TOKENS) -> torch.Tensor:
    return model(ids).logits


def test_names_of_other_models_are_not_gguf_files():
    assert find_gguf("locas_peft/tinybook-glu") is None
    assert find_gguf("some/folder") is None


def test_a_missing_gguf_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package gguf: pip install gguf$"):
        load_gguf(tmp_path / "x.gguf", None, torch.device("cpu"))


# ---------------------------------------------------------------------- kept checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_is_converted_once_and_the_kept_checkpoint_is_the_same_model(
    path, assets, converted, caplog, dtype
):
    caplog.set_level(logging.INFO, "locas_peft")
    direct, tokenizer = gguf_models._convert(path, dtype)
    converted.clear()
    # Its content is the key, not its name.
    moved = path.with_name("moved.gguf")
    shutil.copy(path, moved)
    for file in (path, path, moved):
        model, same = load_gguf(file, dtype, CPU)
        assert torch.equal(logits(model), logits(direct)) and model.dtype == dtype
        assert model.name_or_path == model.config.name_or_path == str(file)
        assert same("the cat, 日本")["input_ids"] == tokenizer("the cat, 日本")["input_ids"]
        assert same.special_tokens_map == tokenizer.special_tokens_map
    assert converted == ["tiny.gguf"]
    (folder,) = find_checkpoints(assets)
    (line,) = caplog.messages
    assert line == f"converting tiny.gguf once (half a minute); kept in {folder}"
    assert str(folder.parent).endswith(str(dtype).removeprefix("torch."))


def test_another_dtype_or_content_is_another_checkpoint(path, assets, converted):
    load_gguf(path, torch.float32, CPU)
    load_gguf(path, torch.bfloat16, CPU)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # a weight
    path.write_bytes(content)
    load_gguf(path, torch.float32, CPU)
    assert len(converted) == len(find_checkpoints(assets)) == 3


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop_a_weight(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def drop_the_config(folder):
    (folder / "config.json").unlink()


def drop_the_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "damage", [cut, drop_a_weight, drop_the_config, drop_the_tokenizer, shutil.rmtree]
)
def test_a_damaged_checkpoint_is_made_again(path, assets, converted, damage):
    before = logits(load_gguf(path, torch.float32, CPU)[0])
    (folder,) = find_checkpoints(assets)
    damage(folder)
    for _ in range(2):
        model, tokenizer = load_gguf(path, torch.float32, CPU)
        assert torch.equal(logits(model), before) and len(tokenizer) == 258
    assert len(converted) == 2


@pytest.mark.parametrize(
    ("module", "failing"),
    [(files, "cached_assets_path"), (gguf_models, "FileLock"), (gguf_models, "staged")],
)
def test_where_nothing_can_be_kept_the_file_itself_is_loaded(
    path, assets, converted, monkeypatch, module, failing
):
    def fail(*args, **kwargs):
        raise OSError("no")

    monkeypatch.setattr(module, failing, fail)
    for _ in range(2):
        assert load_gguf(path, torch.float32, CPU)[0].name_or_path == str(path)
    assert len(converted) == 2
    assert not find_checkpoints(assets)


def test_a_large_file_is_not_kept(path, assets, converted, monkeypatch):
    monkeypatch.setattr(gguf_models, "CONVERTED_BYTES", path.stat().st_size - 1)
    load_gguf(path, torch.float32, CPU)
    assert converted and not assets.exists()
    monkeypatch.setattr(gguf_models, "CONVERTED_BYTES", path.stat().st_size)
    load_gguf(path, torch.float32, CPU)
    assert assets.exists()


def test_the_command_says_on_stderr_that_it_converts_a_file(path, assets, capsys):
    def ask() -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["ask", "Who?", "--without-memory", "--model", str(path), "--device", "cpu"])
        stdout, stderr = capsys.readouterr()
        assert ended.value.code == 0 and stdout.startswith("Who?\n")
        return stderr

    # Below the line is a progress bar of transformers.
    assert ask().startswith(f"converting tiny.gguf once (half a minute); kept in {assets}")
    assert ask() == ""


def test_the_card_of_a_memory_says_how_its_base_is_loaded(path, tmp_path, assets):
    model, tokenizer = load_base(str(path), dtype="float32", device="cpu")
    settings = ReadSettings(r=4, window=16, stride=8, anchor=0.0, model=str(path))
    input_ids = tokenize(tokenizer, "A lighthouse that does not exist.")
    read(model, input_ids, settings, Place(out=tmp_path / "memory"))
    card = (tmp_path / "memory" / "README.md").read_text()
    assert "from locas_peft.bases import load_base\n" in card
    assert f"base, tokenizer = load_base({str(path)!r})" in card


# ---------------------------------------------------------------------- bad input


def test_a_damaged_or_unknown_file_is_refused_in_one_line(path, assets):
    whole = path.read_bytes()
    unknown = write_gguf(path, "no-such-model").read_bytes()
    truncated = (whole[:size] for size in (100, len(whole) // 2, len(whole) - 64))
    for content in (b"", b"GGUF", b"GGUF" + bytes(range(200)), b"PK" * 100, *truncated, unknown):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="^model '.*tiny.gguf' cannot be loaded") as caught:
            load_base(str(path))
        message = str(caught.value)
        assert "\n" not in message
        assert message.endswith("give a whole GGUF file of an architecture that transformers reads")
    assert "no-such-model" in message
    assert not list(assets.glob("locas_peft/gguf/*"))


# ---------------------------------------------------------------------- a pretrained model

needs_smollm2 = pytest.mark.skipif(
    not is_installed("smollm2"), reason=f"SmolLM2 is not installed: {demo.INSTALL}"
)


@pytest.fixture(scope="module")
def smollm2():
    """Load the model once for the tests of this file; each must leave it as it was."""
    return load_base("smollm2", device="cpu")


@needs_smollm2
def test_a_pretrained_model_answers(smollm2):
    model, tokenizer = smollm2
    assert model.name_or_path == model.config.name_or_path == "smollm2"
    assert tokenizer.chat_template and model.config.num_hidden_layers == 30
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(logits(model, ids)[0, -1].argmax()).strip() == "Paris"
    question = demo.load_page_questions()[1]
    informed = Answerer(model, tokenizer, context=demo.load_page(), max_new_tokens=24)
    assert "1868" in informed.answer([question])[0].text


@needs_smollm2
def test_a_pretrained_model_learns_saves_loads_and_merges(smollm2, tmp_path):
    model, tokenizer = smollm2
    page = tokenize(tokenizer, demo.load_page(), 64)
    ids = page.unsqueeze(0)
    before = logits(model, ids)
    adapted = get_peft_model(model, LocasConfig(r=16))
    trainer = TestTimeTrainer(adapted, window=48, stride=32, learning_rate=4e-3, context="cache")
    chunks = list(trainer.read(page))
    assert len(chunks) == 2 and all(chunk.nll_nats > 0 for chunk in chunks)
    adapted.eval().save_pretrained(tmp_path / "memory", save_embedding_layers=False)
    learned = logits(adapted, ids)
    base = adapted.unload()
    base.__dict__.pop("peft_config", None)

    loaded = load_memory(base, tmp_path / "memory").eval()
    assert torch.equal(logits(loaded, ids), learned)
    assert not torch.equal(learned, before)
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded, ids), before), "the base is as it was"
    # bfloat16 rounds the merged products in another order.
    exact = copy.deepcopy(loaded).float()
    unmerged = logits(exact, ids)
    merged = logits(exact.merge_and_unload(), ids)
    assert (merged - unmerged).norm() < 1e-4 * unmerged.norm()
    loaded.unload()
    base.__dict__.pop("peft_config", None)
