"""Many documents at once: each row of a batch has a LOCAS memory of its own, taught by its own document alone.

All rows have the same chunk boundaries. Their memories lie stacked (`tuner/stacking.py`), so that the base's products
and the memories' are batched; what is per row is the loss, the optimizer's state, and whether a chunk was learned.

Axes: B rows, T tokens of a document, W window, S stride, N tokens scored in a chunk, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from ..tuner import STRATEGIES, LocasConfig, LocasLayer, calibrate, empty_memories, list_layers
from ..tuner.passes import evaluating
from ..tuner.stacking import MemoryStack, stacked
from .cache import SlidingCache
from .chunk import Chunk, perplexity_of
from .gradient import Gradient, bypassing, list_attention
from .host import Host
from .losses import WEIGHTINGS, token_losses
from .optimizers import OPTIMIZERS
from .settings import check_context, check_gradient, check_learning, check_lengths, to_document, to_whole

# Those that treat each number of a parameter by itself. Muon does not: it sees a matrix as a whole.
_ELEMENTWISE = ("adamw", "adam", "sgd")


def read_many(
    model: PeftModel,
    documents: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    window: int,
    stride: int,
    learning_rate: float,
    context: str = "recompute",
    gradient: Gradient = "full",
    optimizer: str = "adamw",
    warmup_steps: int = 2,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
    token_weighting: str = "uniform",
) -> ManyReading:
    """Reads many documents at once and teaches each to a fresh memory of its own, which gets the document's name.

    Each row is what a `TestTimeTrainer` of the same settings would make of that document alone, up to rounding. The
    memories are configured as the model's active one, which itself is neither used nor changed. They are adapters of
    the model like any other from the first record on, as far as they have learned: the caller may stop, and save, at
    any record. A document that is through drops out of the batch, and its memory is not touched again.

    Args:
        model: a PEFT model whose active adapter is a LOCAS memory, and whose adapters are all LOCAS memories. Mutated:
            the memories are added, inactive. `model.delete_adapter(name)` takes one away.
        documents: from names, which no adapter of the model has, to LongTensors [T] or [1, T], T >= 2; lengths may
            differ. All are in one batch: the caller shares larger collections out.
        window, stride, learning_rate, context, gradient, warmup_steps, weight_decay, token_weighting: as
            `TestTimeTrainer` takes them.
        optimizer: "adamw", "adam" or "sgd".
        max_grad_norm: clips the norm of each memory's own gradient where not None.

    Returns:
        An iterator that gives, for each chunk, the records of the documents that reach it. It does its work as it is
        asked for them; the memories are made with the first.

    Raises:
        TypeError, ValueError: at the call, in one line that names the argument, its rule, its value and the remedy;
            the model is as it was.

    Example:
        >>> reading = read_many(model, {"emma": emma, "persuasion": persuasion}, window=512, stride=256,
        ...                     learning_rate=2e-3, context="cache")
        >>> for records in reading:
        ...     print({name: reading.perplexity(name) for name in records})
        >>> model.save_pretrained("memories", selected_adapters=["emma"])
    """
    host = Host(model)
    window, stride = to_whole("window", window, 1), to_whole("stride", stride, 1)
    warmup_steps = to_whole("warmup_steps", warmup_steps, 0)
    check_lengths(host, window, stride)
    check_context(host, context)
    check_gradient(host, gradient)
    if optimizer not in _ELEMENTWISE:
        raise ValueError(
            f"optimizer must be one of {', '.join(_ELEMENTWISE)} where many documents are read at once, got "
            f"{optimizer!r}: choose one of them, or read one after the other with TestTimeTrainer"
        )
    if learning_rate is None:
        raise ValueError("learning_rate must be a number above 0, got None: give one, 1e-3 say")
    check_learning(learning_rate, weight_decay, max_grad_norm, token_weighting)
    config = _check_model(model)
    texts = _check_documents(host, model, documents)
    return ManyReading(
        model,
        host,
        config,
        {name: ids.to(host.device) for name, ids in texts.items()},
        window=window,
        stride=stride,
        cached=context == "cache",
        bypassed=list_attention(model) if gradient == "tokenwise" else [],
        optimizer=optimizer,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        token_weighting=token_weighting,
    )


class ManyReading:
    """The reading that `read_many` began: an iterator over chunks, and what was read so far.

    Attributes:
        chunks: for each document its records.
        skipped_chunks: for each document how many chunks were not learned because a loss or a gradient was not finite.
    """

    def __init__(
        self,
        model: PeftModel,
        host: Host,
        config: LocasConfig,
        texts: dict[str, Tensor],
        *,
        window: int,
        stride: int,
        cached: bool,
        bypassed: list[nn.Module],
        optimizer: str,
        learning_rate: float,
        warmup_steps: int,
        weight_decay: float,
        max_grad_norm: float | None,
        token_weighting: str,
    ):
        self.chunks: dict[str, list[Chunk]] = {name: [] for name in texts}
        self.skipped_chunks = dict.fromkeys(texts, 0)
        self._model, self._host, self._config, self._texts = model, host, config, texts
        self._stride, self._cached, self._bypassed = stride, cached, bypassed
        self._context_tokens = max(window - stride, 1)
        self._optimizer_name, self._rate, self._weight_decay = optimizer, learning_rate, weight_decay
        self._warmup_steps, self._max_grad_norm = warmup_steps, max_grad_norm
        self._weigh = WEIGHTINGS[token_weighting]

        self._names = list(texts)  # of the rows that are still read
        self._ids = _pad(list(texts.values()))
        self._stacks: list[MemoryStack] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._steps = dict.fromkeys(texts, 0)
        self._cache = SlidingCache(host, self._context_tokens - 1, len(texts), self._reading_rows)
        self._records = self._read()

    def __iter__(self) -> Iterator[dict[str, Chunk]]:
        return self

    def __next__(self) -> dict[str, Chunk]:
        return next(self._records)

    def close(self) -> None:
        """Ends the reading; the memories stay as they are. Dropping the object does the same."""
        self._records.close()

    def perplexity(self, name: str) -> float:
        """exp(sum of nll / number of scored tokens) of a document so far; nan before its first scored token."""
        return perplexity_of(self.chunks[name])

    def _read(self) -> Iterator[dict[str, Chunk]]:
        self._add_memories()
        self._stack(self._names)
        parameters = {name: self._weights(name) for name in self._names}
        make = OPTIMIZERS[self._optimizer_name]
        self._optimizer = make([w for its in parameters.values() for w in its], self._rate, self._weight_decay)
        (group,) = self._optimizer.param_groups
        # A group a row: rows that skipped a chunk are behind in the warm-up.
        self._optimizer.param_groups = [{**group, "params": its} for its in parameters.values()]
        try:
            for start in range(0, self._ids.shape[1], self._stride):
                records = self._score_and_learn(start)
                for name, chunk in records.items():
                    self.chunks[name].append(chunk)
                self._drop([name for name, chunk in records.items() if chunk.stop == len(self._texts[name])])
                yield records
        finally:
            self._drop(self._names)
            self._cache.forget()
            self._optimizer = None

    def _add_memories(self) -> None:
        """Adds a memory for each document, made as the single reader makes one: calibrated on its first chunk."""
        trained = {parameter: parameter.requires_grad for parameter in self._model.parameters()}
        template = self._model.active_adapters[0]
        dtypes = {layer: layer.locas_up[template].weight.dtype for layer in self._layers(template)}
        try:
            for name, ids in self._texts.items():
                self._model.add_adapter(name, copy.deepcopy(self._config))
                for layer, dtype in dtypes.items():
                    for part in layer.projections(name):
                        part.to(dtype)
                if empty_memories(self._model, name):
                    calibrate(self._model, [ids[: self._stride].unsqueeze(0)], name)
        except BaseException:
            for name in self._texts.keys() & self._model.peft_config.keys():
                self._model.delete_adapter(name)
            raise
        finally:
            for parameter, requires_grad in trained.items():
                parameter.requires_grad_(requires_grad)

    def _score_and_learn(self, start: int) -> dict[str, Chunk]:
        began = time.perf_counter()
        self._check_memories()
        stops = [min(start + self._stride, len(self._texts[name])) for name in self._names]
        counts = [stop - max(start, 1) for stop in stops]
        nlls, learned = [0.0] * len(counts), [False] * len(counts)
        with evaluating(self._model), stacked(self._model, self._stacks), bypassing(self._bypassed):
            if max(counts):
                with torch.enable_grad():
                    losses = self._losses(start, stops, counts)
                    mean_losses = torch.stack([self._weigh(its_losses) for its_losses in losses])
                    sums = torch.stack([its_losses.detach().double().sum() for its_losses in losses])
                nlls, *finite = torch.stack([sums, mean_losses.detach().double()]).tolist()
                healthy = [math.isfinite(nll) and math.isfinite(loss) for nll, loss in zip(nlls, *finite, strict=True)]
                learned = self._learn(mean_losses, healthy)
                self._cache.advance()
                self._cache.forget([row for row, good in enumerate(learned) if not good])
                for name, good in zip(self._names, learned, strict=True):
                    self.skipped_chunks[name] += not good
        seconds = (time.perf_counter() - began) / len(self._names)
        return {
            name: Chunk(len(self.chunks[name]), start, stop, count, nll, seconds, good)
            for name, stop, count, nll, good in zip(self._names, stops, counts, nlls, learned, strict=True)
        }

    def _losses(self, start: int, stops: list[int], counts: list[int]) -> list[Tensor]:
        """Gives each row's losses [N], in one forward pass over all rows."""
        longest = max(counts)
        if self._cached:
            logits = self._cache.forward(self._ids, max(start - 1, 0), [stop - 1 for stop in stops], longest)
        else:
            begin = max(0, start - self._context_tokens)
            logits = self._host.logits(self._ids[:, begin : max(stops) - 1], longest, use_cache=False)
        targets = self._ids[:, max(start, 1) : max(stops)]
        if min(counts) == longest:
            return list(token_losses(logits.flatten(0, 1), targets.flatten()).unflatten(0, targets.shape))
        # What follows a text's end is no part of any loss: a value that is not finite there must not reach one.
        own = torch.arange(longest, device=targets.device) < torch.tensor(counts, device=targets.device).unsqueeze(1)
        return list(token_losses(logits[own], targets[own]).split(counts))

    def _learn(self, losses: Tensor, healthy: list[bool]) -> list[bool]:
        """Takes one optimizer step for each row whose loss and gradient are finite, and says which they are.

        Args:
            losses: [B], one a row. Their sum's gradient is each row's own, since no memory answers two rows.
            healthy: which of them are finite.
        """
        if not any(healthy):
            return healthy
        torch.stack([loss for loss, good in zip(losses, healthy, strict=True) if good]).sum().backward()
        norms = torch.stack([
            torch.linalg.vector_norm(leaf.grad, dim=(1, 2)) for stack in self._stacks for leaf in stack.leaves
        ])  # fmt: skip
        norms = torch.linalg.vector_norm(norms.double(), dim=0).tolist()
        learned = [good and math.isfinite(norm) for good, norm in zip(healthy, norms, strict=True)]
        for stack in self._stacks:
            stack.hand_out_gradients()
        for name, group, good, norm in zip(self._names, self._optimizer.param_groups, learned, norms, strict=True):
            if not good:
                for weight in group["params"]:
                    weight.grad = None  # which an optimizer leaves alone, its state too
                continue
            if self._max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(group["params"], self._max_grad_norm, torch.tensor(norm))
            self._steps[name] += 1
            group["lr"] = self._rate * min(1.0, self._steps[name] / (self._warmup_steps + 1))
        if any(learned):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return learned

    def _drop(self, names: list[str]) -> None:
        """Takes rows out of the batch; their memories get weights of their own again."""
        if not names:
            return
        rows = [row for row, name in enumerate(self._names) if name not in names]
        kept = [self._names[row] for row in rows]
        for stack in self._stacks:
            stack.release()
        if self._optimizer is not None:
            groups = self._optimizer.param_groups
            self._optimizer.param_groups = [groups[row] for row in rows]
            held = {weight for group in self._optimizer.param_groups for weight in group["params"]}
            for weight in self._optimizer.state.keys() - held:
                del self._optimizer.state[weight]
        self._names, self._stacks = kept, []
        if kept:
            self._ids = self._ids[rows]
            self._cache.narrow(rows)
            self._stack(kept)

    def _stack(self, names: list[str]) -> None:
        self._stacks = [MemoryStack(layer, names) for layer in self._layers(names[0])]

    def _reading_rows(self, rows: list[int]):
        return stacked(self._model, self._stacks, rows)

    def _layers(self, name: str) -> list[LocasLayer]:
        return [layer for layer in list_layers(self._model) if name in layer.locas_up]

    def _weights(self, name: str) -> list[nn.Parameter]:
        return [part.weight for layer in self._layers(name) for part in layer.projections(name)]

    def _check_memories(self) -> None:
        if not all(stack.is_whole() for stack in self._stacks):
            raise ValueError(
                "model must keep the memories that are being read into as they are, got one that was moved, merged or "
                "deleted: call close() on the reading first"
            )


def _pad(texts: list[Tensor]) -> Tensor:
    """Gives the documents as LongTensor [B, T], each followed by its own last token."""
    length = max(map(len, texts))
    return torch.stack([torch.cat([ids, ids[-1:].expand(length - len(ids))]) for ids in texts])


def _check_model(model: nn.Module) -> LocasConfig:
    """Gives the configuration of the memories to be added: the active one's, without what calibration filled in."""
    config = model.active_peft_config if isinstance(model, PeftModel) else None
    if not isinstance(config, LocasConfig):
        got = type(model).__name__ if config is None else f"one with {config.peft_type.value}"
        raise ValueError(
            f"model must be a PEFT model with an active LOCAS memory, got {got}: use get_peft_model(model, "
            "LocasConfig()), or read one after the other with TestTimeTrainer"
        )
    if len(model.active_adapters) > 1:
        raise ValueError(
            f"model must have one active adapter, got {', '.join(model.active_adapters)}: call set_adapter with the "
            "one that the memories shall be like"
        )
    for module in model.modules():
        foreign = isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not isinstance(module, LocasLayer)
        if foreign:
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise ValueError(
                f"model must have LOCAS memories alone, got {kind}, which cannot be taught a row at a time: merge or "
                "unload it, or read one after the other with TestTimeTrainer"
            )
        if isinstance(module, LocasLayer) and module.merged:
            raise ValueError("model must not have a memory merged into the base: call unmerge_adapter() first")
        if isinstance(module, LocasLayer) and module.disable_adapters:
            raise ValueError("model must not have its adapters disabled, got disabled ones: enable them first")
    if STRATEGIES[config.init_strategy].written:
        raise ValueError(
            f"init_strategy must be one that makes rows, got {config.init_strategy!r}, whose slots are written one "
            "document at a time: choose 'topk', or read one after the other with TestTimeTrainer"
        )
    config = copy.deepcopy(config)
    config.slots, config.inference_mode, config._expected_host = None, False, None
    return config


def _check_documents(
    host: Host, model: PeftModel, documents: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    pairs = list(documents.items() if isinstance(documents, Mapping) else documents)
    if not pairs:
        raise ValueError("documents must hold at least one, got none: give a mapping from names to LongTensors")
    texts: dict[str, Tensor] = {}
    for name, ids in pairs:
        if not isinstance(name, str):
            raise TypeError(f"documents' names must be strings, got {type(name).__name__}: give each a name")
        # PEFT keeps adapters as attributes of modules, and looks for their names inside those of weights.
        if not name or "." in name or name.startswith("__") or hasattr(nn.ModuleDict(), name) or name in "locas_":
            raise ValueError(
                f"documents' names must be names that an adapter can have, got {name!r}: give one without dots that "
                "is no word of PyTorch's, nor a part of 'locas_'"
            )
        if name in texts:
            raise ValueError(f"documents' names must differ, got {name!r} twice: give each its own")
        if name in model.peft_config:
            raise ValueError(
                f"documents' names must be new to the model, got {name!r}, which is an adapter already: choose "
                "another name, or delete_adapter that one first"
            )
        texts[name] = to_document(host, ids, f"documents[{name!r}]")
    return texts
