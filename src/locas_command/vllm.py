"""The plug-in of vLLM: a request whose `model` is the name of a memory in a library is answered with that memory.

vLLM calls `register` in each of its processes. It does nothing unless LOCAS_LIBRARY names a library.
"""

import logging
import os
from asyncio import get_running_loop
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def register() -> None:
    """Register a resolver for the library LOCAS_LIBRARY; settings that cannot be are a `ValueError`.

    LOCAS_REQUIRE_SIGNATURE names the file of a key that its memories must be signed with, and LOCAS_ADAPTERS_GB is the
    most that is kept of their adapters, 10 where it is not given.
    """
    folder, gigabytes = (
        os.environ.get("LOCAS_LIBRARY"),
        float(os.environ.get("LOCAS_ADAPTERS_GB") or 10),
    )
    if not folder:
        return
    if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() not in ("1", "true"):
        raise ValueError(
            "LOCAS_LIBRARY needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: vLLM asks no resolver without it"
        )
    if not os.path.isdir(folder):
        raise ValueError(
            f"LOCAS_LIBRARY must be a folder of memories, got {folder!r}: see memorize --library"
        )
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    from locas_peft.library import Library
    from locas_peft.library.adapters import Adapters

    library = Library(folder, require_signature=os.environ.get("LOCAS_REQUIRE_SIGNATURE") or None)
    adapters, pool = Adapters(library, gigabytes * 1e9), ThreadPoolExecutor(1)  # one at a time

    class LibraryResolver(LoRAResolver):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            try:
                path = await get_running_loop().run_in_executor(
                    pool, adapters.make, lora_name, base_model_name
                )
            except (ValueError, OSError) as error:
                return logging.getLogger("vllm.locas_peft").warning(
                    "model %r is not served: %s", lora_name, error
                )
            return LoRARequest(lora_name, 1, path)  # vLLM replaces the number

    class CurrentRequests(dict):
        """The adapters that vLLM has loaded. It would serve one until it ends: drop it when its memory changes."""

        def __contains__(self, name: object) -> bool:
            if name in self.keys() and not adapters.is_current(name, self[name].lora_path):
                del self[name]
            return super().__contains__(name)

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_initialize(self, *args, **kwargs)
        self.lora_requests = CurrentRequests(self.lora_requests)

    def shrink(self: Any, y: Any, *args: Any) -> None:
        # Rows of the base have the slot -1, which vLLM takes for the last one (docs/upstream/vllm-base-rows.md).
        plain_shrink(self, y, *args)
        y.view(-1, y.shape[-1])[self.token_lora_indices < 0] = 0

    plain_initialize, plain_shrink = OpenAIServingModels.__init__, PunicaWrapperCPU._apply_shrink
    LoRAResolverRegistry.register_resolver("locas_peft", LibraryResolver())
    OpenAIServingModels.__init__, PunicaWrapperCPU._apply_shrink = initialize, shrink
