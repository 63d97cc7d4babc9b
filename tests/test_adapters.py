"""The memories of a library as adapters for an engine, and the plug-in of vLLM, here without vLLM."""

import asyncio
import os
import shutil
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import make_host
from peft import PeftModel
from test_families import learn, logits, make_memory

from locas_command.vllm import register
from locas_peft.library import Library
from locas_peft.library.adapters import Adapters
from locas_peft.memories.conversion import export_memory
from locas_peft.memories.folder import save_memory
from locas_peft.memories.signing import sign_memory


class Tokenizer:
    def save_pretrained(self, folder):
        pass


def add(library: Path, name: str, family: str = "llama", **options) -> PeftModel:
    model = make_memory(family, **options)
    learn(model)
    save_memory(model, library / name, "host", "card")
    return model


def make_library(folder: Path, family: str = "llama", **options) -> tuple[Path, str, PeftModel]:
    """A library with the memory "ann", the folder of its base, 6 neurons wider, and the model with the memory."""
    model = add(folder / "users", "ann", family, **options)
    export_memory(
        make_host(family),
        Tokenizer(),
        folder / "users" / "ann",
        folder,
        neurons=6,
        with_adapter=False,
    )
    return folder / "users", str(folder / "base"), model


def age(adapter: str) -> None:
    os.utime(adapter, (time.time() - 601,) * 2)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "opt", "lfm2"])
def test_an_adapter_on_the_wider_base_is_the_memory(family, tmp_path):
    users, base, model = make_library(tmp_path, family, scaling=1.5)
    adapter = Adapters(Library(users), 1e9).make("ann", base)
    wide = type(make_host(family)).from_pretrained(base, attn_implementation="eager")
    torch.testing.assert_close(logits(wide), logits(make_host(family)), rtol=0, atol=1e-5)
    lora = PeftModel.from_pretrained(wide, adapter)
    torch.testing.assert_close(logits(lora), logits(model), rtol=1e-4, atol=1e-4)
    assert Library(users).list() == ["ann"]


def test_an_adapter_is_made_once_and_again_when_the_memory_changes(tmp_path):
    users, base, _ = make_library(tmp_path)
    adapters = Adapters(Library(users), 1e9)
    first = adapters.make("ann", base)
    made = Path(first, "adapter_model.safetensors").stat().st_mtime_ns
    assert adapters.make("ann", base) == first and adapters.is_current("ann", first)
    assert Adapters(Library(users), 1e9).make("ann", base) == first
    assert Path(first, "adapter_model.safetensors").stat().st_mtime_ns == made
    add(users, "ann", seed=5)
    assert not adapters.is_current("ann", first)
    second = adapters.make("ann", base)
    assert second != first and adapters.is_current("ann", second)
    assert os.path.isdir(first), "a request may be waiting for it"
    age(first)
    adapters.make("ann", base)
    assert not os.path.exists(first) and adapters.is_current("elsewhere", "/some/other/adapter")


def test_what_is_forgotten_is_refused_and_its_adapter_deleted(tmp_path):
    users, base, _ = make_library(tmp_path)
    library = Library(users)
    adapters = Adapters(library, 1e9)
    adapter = adapters.make("ann", base)
    library.forget("ann")
    assert not list((users / ".adapters").glob("*/*")) and not adapters.is_current("ann", adapter)
    with pytest.raises(ValueError, match="there is no memory 'ann' in this library"):
        adapters.make("ann", base)
    add(users, "bob"), add(users, "cy")
    adapters.make("bob", base), adapters.make("cy", base)
    library.rename("cy", "dan")
    shutil.rmtree(users / "bob")
    add(users, "eve")
    adapters.make("eve", base)
    (left,) = (users / ".adapters").glob("*/*")
    assert left.parent.name == "eve", "that of a memory that was deleted by hand is gone, too"


def test_the_least_recently_used_adapters_go_where_there_is_no_room(tmp_path):
    users, base, _ = make_library(tmp_path)
    for name in ("bob", "cy"):
        shutil.copytree(users / "ann", users / name)
    adapters = Adapters(Library(users), 0)
    ann, bob = adapters.make("ann", base), adapters.make("bob", base)
    age(ann)
    adapters.make("cy", base)
    assert not os.path.exists(ann) and os.path.isdir(bob)
    assert not adapters.is_current("ann", ann) and adapters.make("ann", base) == ann


@pytest.mark.parametrize(
    "name", ["../users/ann", "ann/../ann", "/etc", "..", ".adapters", "", "ann\n", "nobody", "link"]
)
def test_a_name_that_is_no_memory_is_refused(name, tmp_path):
    users, base, _ = make_library(tmp_path)
    (users / "link").symlink_to(users / "ann")
    with pytest.raises(ValueError, match="there is no memory"):
        Adapters(Library(users), 1e9).make(name, base)
    assert not (users / ".adapters").exists()


def test_memories_that_cannot_be_served_are_refused(tmp_path):
    users, base, _ = make_library(tmp_path)
    (
        add(users, "wide", r=7),
        add(users, "other", "qwen2"),
        shutil.copytree(users / "ann", users / "gelu"),
    )
    config = users / "gelu" / "adapter_config.json"
    config.write_text(config.read_text().replace("SiLU", "GELU"))
    save_memory(make_host_lora(), users / "lora", "host", "card")
    (tmp_path / "plain").mkdir()
    make_host("llama").save_pretrained(tmp_path / "plain")
    adapters = Adapters(Library(users), 1e9)
    for name, message in (
        ("wide", "neurons must be at least the memory's r of 7, got 6: raise it"),
        (
            "other",
            "memory must be of the base that is served, got 'other' of another: export its own",
        ),
        (
            "gelu",
            "memory must be of the base that is served, got 'gelu' of another: export its own",
        ),
        (
            "lora",
            "memory must be of the base that is served, got 'lora' of another: export its own",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            adapters.make(name, base)
    with pytest.raises(
        ValueError, match="the served model must be of locas export --base-only, got .*plain"
    ):
        Adapters(Library(users), 1e9).make("ann", str(tmp_path / "plain"))
    assert not list((users / ".adapters").glob("*/*"))


def make_host_lora() -> PeftModel:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(make_host("llama"), LoraConfig(target_modules=["up_proj"]))


def test_a_key_is_asked_for_each_time(tmp_path):
    from test_signing import ec, write_private, write_public  # skips the test without model-signing

    users, base, _ = make_library(tmp_path)
    private = ec.generate_private_key(ec.SECP256R1())
    write_private(tmp_path / "key", private), write_public(tmp_path / "key.pub", private)
    adapters = Adapters(Library(users, require_signature=tmp_path / "key.pub"), 1e9)
    with pytest.raises(ValueError, match="must be signed"):
        adapters.make("ann", base)
    sign_memory(users / "ann", tmp_path / "key")
    assert adapters.make("ann", base)
    (users / "ann" / "sample.txt").write_text("added")
    with pytest.raises(ValueError, match="Extra files found in model .ann.: sample.txt"):
        adapters.make("ann", base)


# ---------------------------------------------------------------------- the plug-in


@pytest.fixture
def fake_vllm(monkeypatch):
    """The classes of vLLM that the plug-in uses, by their documented interface; its own modules are not installed."""

    class Models:
        def __init__(self, count):
            self.count, self.lora_requests = count, {}

    class Wrapper:
        token_lora_indices = torch.tensor([0, -1, 1])

        def _apply_shrink(self, y, x, weights, scale):
            y += scale * torch.einsum("bi,boi->bo", x, weights[self.token_lora_indices])

    registered = {}
    request = namedtuple("LoRARequest", "lora_name lora_int_id lora_path")
    registry = SimpleNamespace(register_resolver=registered.__setitem__)
    for name, content in (
        ("entrypoints.openai.models.serving", {"OpenAIServingModels": Models}),
        ("lora.punica_wrapper.punica_cpu", {"PunicaWrapperCPU": Wrapper}),
        ("lora.request", {"LoRARequest": request}),
        ("lora.resolver", {"LoRAResolver": object, "LoRAResolverRegistry": registry}),
    ):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", SimpleNamespace(**content))
    for name in (
        "LOCAS_LIBRARY",
        "LOCAS_REQUIRE_SIGNATURE",
        "LOCAS_ADAPTERS_GB",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    ):
        monkeypatch.delenv(name, raising=False)
    return SimpleNamespace(models=Models, wrapper=Wrapper, resolvers=registered)


def test_the_plug_in_registers_only_what_it_is_asked_for(fake_vllm, monkeypatch, tmp_path):
    register()
    monkeypatch.setenv("LOCAS_LIBRARY", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="LOCAS_LIBRARY needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        register()
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with pytest.raises(ValueError, match="LOCAS_LIBRARY must be a folder of memories, got .*none"):
        register()
    assert not fake_vllm.resolvers


def test_the_resolver_makes_refuses_and_drops(fake_vllm, monkeypatch, tmp_path, caplog):
    users, base, _ = make_library(tmp_path)
    monkeypatch.setenv("LOCAS_LIBRARY", str(users))
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    register()
    (resolver,) = fake_vllm.resolvers.values()
    found = asyncio.run(resolver.resolve_lora(base, "ann"))
    assert found.lora_name == "ann" and found.lora_path == Adapters(Library(users), 1e9).make(
        "ann", base
    )
    assert asyncio.run(resolver.resolve_lora(base, "../ann")) is None
    assert (
        "model '../ann' is not served: there is no memory '../ann' in this library" in caplog.text
    )
    for name in "bcdef":
        shutil.copytree(users / "ann", users / name)

    async def resolve_all():
        return await asyncio.gather(*(resolver.resolve_lora(base, name) for name in "bcdef"))

    assert [each.lora_name for each in asyncio.run(resolve_all())] == list("bcdef")
    models = fake_vllm.models(3)
    models.lora_requests |= {"ann": found, "static": found._replace(lora_path="/elsewhere")}
    assert (
        models.count == 3 and "ann" in models.lora_requests and "nobody" not in models.lora_requests
    )
    Library(users).forget("ann")
    assert "ann" not in models.lora_requests and list(models.lora_requests) == ["static"]
    assert (
        "static" in models.lora_requests and asyncio.run(resolver.resolve_lora(base, "ann")) is None
    )


def test_rows_of_the_base_get_nothing_of_a_memory(fake_vllm, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAS_LIBRARY", str(tmp_path))
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    register()
    x, weights, y = torch.randn(3, 4), torch.randn(2, 5, 4), torch.zeros(3, 5)
    fake_vllm.wrapper()._apply_shrink(y, x, weights, 2.0)
    assert not y[1].any()
    torch.testing.assert_close(y[[0, 2]], 2 * torch.stack([weights[0] @ x[0], weights[1] @ x[2]]))
