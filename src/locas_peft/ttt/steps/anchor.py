"""The anchor limits how learning one text changes the model's output on other texts.

Some optimizer steps also minimise the KL divergence from the reference to the model with its
adapter, on n texts of L tokens that the reference generated. The reference is the base, or the
model with an adapter as it was. This is our addition; the paper bounds a memory by tau and
the norm clip of the slots.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...asking import continue_rows, draw
from ...checks import check_whole
from ...model import CausalLM, compute_once, divergences
from ...text import digest_ids
from ...tuner import evaluating, reference_active
from ...tuner.modules import AdapterLayers, base_parameters
from ..learner import total_norm
from . import Step

if TYPE_CHECKING:
    from ..trainer import TestTimeTrainer

__all__ = ["Anchor", "OwnText", "write_own_text"]

_logger = logging.getLogger(__name__)


class Anchor(Step):
    """Keep an adapter in training close to its reference, on texts of the reference's own.

    Args:
        texts: LongTensor [n, L], L >= 2, or an `OwnText`; each pull uses one, in turns.
        weight: of KL(reference || with the adapter), the mean over L - 1 tokens in nats, beside the
            chunk's loss.
        every: every n-th step pulls, with n times the weight: two forward passes and a backward one
            over L - 1 tokens, or one forward pass less where a text returns. The gradient of a pull
            is at most n times as long as that of the chunk: longer ones are scaled down.
        reference: the frozen adapter that the KL is measured from; None for the base. An `OwnText`
            has its own, and takes none here.

    Raises:
        TypeError, ValueError: for texts of another kind or shape, and numbers out of range.
    """

    name = "anchor"

    def __init__(
        self,
        texts: Tensor | OwnText,
        weight: float = 1.0,
        every: int = 4,
        reference: str | None = None,
    ):
        if isinstance(texts, OwnText):
            if reference is not None:
                rule = "anchor reference must be that of the OwnText"
                raise ValueError(f"{rule}, got {reference!r} for the anchor: leave it out")
            reference = texts.reference
        else:
            _check_texts(texts)
        if not 0 < weight < math.inf:
            rule = f"anchor weight must be a number above 0, got {weight}"
            raise ValueError(f"{rule}: for none, give no anchor")
        check_whole("anchor every", every, 1)
        self.texts = texts
        self.weight = weight
        self.every = every
        self.reference = reference
        self._logits: _ReferenceLogits | None = None

    @property
    def settings(self) -> dict[str, Any]:
        texts: dict[str, Any]
        if isinstance(self.texts, OwnText):
            texts = self.texts.settings
        else:
            texts = {"sha256": digest_ids(self.texts)}
        numbers = {"weight": self.weight, "every": self.every}
        return {**numbers, "reference": self.reference, "texts": texts}

    def check(self, trainer: TestTimeTrainer) -> None:
        if trainer.is_only_written:
            rule = "steps must not have an Anchor for a memory that is written and not trained"
            remedy = "give a learning_rate, or leave the anchor out"
            raise ValueError(f"{rule}, got one, which acts on training steps: {remedy}")
        host = trainer.host
        own = {id(weight) for _, weight in base_parameters(host.model)}
        trained = [id(weight) for weight in trainer.learner.parameters()]
        if self.reference is None and trained and own.issuperset(trained):
            rule = "steps must not have an Anchor where the base itself is trained"
            reason = "which would be pulled to itself"
            raise ValueError(f"{rule}, {reason}, got one: train an adapter, or leave it out")
        if not isinstance(self.texts, OwnText):
            host.check_tokens(self.texts, "anchor texts", "write them with this model")
        length = self.texts.shape[1]
        if host.positions is not None and length > host.positions:
            rule = f"anchor texts must be within the model's {host.positions} positions"
            raise ValueError(f"{rule}, got {length} tokens: write shorter ones")

    def before_optimizer_step(self, trainer: TestTimeTrainer) -> None:
        number = self.number_of(trainer.learner.steps)
        if number is None:
            return
        parameters = trainer.learner.parameters()
        learned = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.loss(trainer.host, number).backward()
        _add_bounded(parameters, learned, limit=self.every)

    def number_of(self, step: int) -> int | None:
        """Return the number of the text of optimizer step `step`, both from 0; None for no pull."""
        pull, remainder = divmod(step, self.every)
        if remainder < self.every - 1:
            return None
        return pull % len(self.texts)

    def loss(self, host: CausalLM, number: int) -> Tensor:
        """Return the weighted divergence from the reference on text `number`, a scalar in nats."""
        ids = self.texts[number][None, :-1].to(host.device)
        reference_logits = self._find_logits(host).compute(ids, number)
        logits = host.logits(ids, ids.shape[1], use_cache=False)[0]
        return self.weight * self.every * divergences(logits, reference_logits).mean()

    def _find_logits(self, host: CausalLM) -> _ReferenceLogits:
        if self._logits is None or not self._logits.is_of(host):
            self._logits = _ReferenceLogits(host, self.reference)
        return self._logits


@torch.no_grad()
def _add_bounded(
    parameters: Sequence[nn.Parameter], learned: Sequence[Tensor | None], limit: float
) -> None:
    """Add the gradients of a chunk to those of a pull, which are first scaled down where needed.

    A pull on a text that the memory has changed much can have a gradient a hundred times as long as
    that of a chunk. An optimizer such as AdamW would then follow the pull alone for many steps.

    Args:
        parameters: their gradients are those of the pull.
        learned: the gradients of the chunk; the lengths are norms over all parameters.
        limit: how many times as long as the chunk's the pull's gradient is at most.
    """
    pulls = [parameter.grad for parameter in parameters]
    longest = limit * total_norm(learned)
    length = total_norm(pulls)
    # The device is not waited for. A norm that is not finite stays so, and the step is not taken.
    factor = (longest / length.clamp(min=torch.finfo(length.dtype).tiny)).clamp(max=1.0)
    for parameter, pull, gradient in zip(parameters, pulls, learned, strict=True):
        if pull is None:
            parameter.grad = gradient
            continue
        # Layers may be on several devices.
        pull.mul_(factor.to(pull.device))
        if gradient is not None:
            pull.add_(gradient)


class _ReferenceLogits:
    """The logits of a host's reference, in place of those with the adapters that are trained.

    Of a text that returns, the hidden states before the head are kept, [1, n, D], where the logits
    are the head's product with them: a pull on it costs no pass through the reference's layers.
    Logits themselves would take a gigabyte for 32 texts and a vocabulary of 150,000.
    """

    def __init__(self, host: CausalLM, reference: str | None):
        # Never compiled: what a captured graph returns would be overwritten by the next pass.
        self._host = CausalLM(host.model)
        self._adapters = AdapterLayers(host.model)
        self._reference = reference
        self._head = host.model.get_output_embeddings()
        self._hidden: dict[int, Tensor] = {}
        # None until the first text has shown whether the head alone makes the logits.
        self._keeps: bool | None = None
        is_trained = any(weight.requires_grad for _, weight in base_parameters(host.model))
        if is_trained or not _is_plain(self._head):
            self._keeps = False

    def is_of(self, host: CausalLM) -> bool:
        """Return whether a host is the one of before, with the same adapters in use."""
        return host.model is self._host.model and not self._adapters.were_switched()

    @torch.no_grad()
    def compute(self, ids: Tensor, number: int) -> Tensor:
        """Return the logits [n, V] of text `number`, whose ids are [1, n]."""
        with self._adapters.referring_to(self._reference):
            if number in self._hidden:
                return self._head(self._hidden[number])[0]
            if self._keeps is False:
                return self._host.logits(ids, ids.shape[1], use_cache=False)[0]
            return self._compute_and_keep(ids, number)

    def _compute_and_keep(self, ids: Tensor, number: int) -> Tensor:
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: tuple) -> None:
            seen.append(args[0])

        with self._head.register_forward_pre_hook(keep):
            logits = self._host.logits(ids, ids.shape[1], use_cache=False)[0]
        if self._keeps is None:
            # Some families scale or bound what the head returns.
            self._keeps = len(seen) == 1 and torch.equal(self._head(seen[0])[0], logits)
        if self._keeps:
            self._hidden[number] = seen[0]
        return logits


def _is_plain(head: nn.Module | None) -> bool:
    """Return whether a head can be called outside of its model.

    It cannot where it is sharded, or where Accelerate moves its input or its weight.
    """
    weight = getattr(head, "weight", None)
    if hasattr(head, "_hf_hook"):
        return False
    return isinstance(weight, Tensor) and type(weight.data) is Tensor and not weight.is_meta


class OwnText:
    """Texts of `write_own_text`, written when they are needed, once in a process.

    They are written in two batches. A batch of many texts takes little longer than one of a few,
    and a short reading uses only a few.

    Args:
        model: a causal language model, plain or with adapters.
        texts, tokens: n and L.
        seed: of the first batch; the second one has the next number.
        first: how many texts are written when the first one is used. The others are written when
            one of them is used.
        beginnings, reference: see `write_own_text`.

    `shape` is (n, L), and `written` a LongTensor [k, L] of the texts so far.
    """

    def __init__(
        self,
        model: nn.Module,
        texts: int = 32,
        tokens: int = 128,
        seed: int = 0,
        first: int = 8,
        beginnings: Sequence[Sequence[int]] | None = None,
        reference: str | None = None,
    ):
        check_whole("texts", texts, 1)
        check_whole("tokens", tokens, 2)
        check_whole("first", first, 1)
        host = CausalLM(model)
        self._beginnings = _complete_beginnings(host, beginnings, tokens)
        self.shape = torch.Size((texts, tokens))
        self.written = torch.empty(0, tokens, dtype=torch.long, device=host.device)
        self._model = model
        self._seed = seed
        self._first = first
        self.reference = reference

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that the texts depend on, but the model and the reference."""
        texts, tokens = self.shape
        return {
            "texts": texts,
            "tokens": tokens,
            "seed": self._seed,
            "first": self._first,
            "beginnings": [list(beginning) for beginning in self._beginnings],
        }

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> Tensor:
        """Return a text, LongTensor [L]; write it, and those before it, where they are missing."""
        while len(self.written) <= index:
            self._write_next_batch()
        return self.written[index]

    def _write_next_batch(self) -> None:
        begun = len(self.written)
        texts, tokens = self.shape
        count = texts - begun if begun else min(self._first, texts)
        seed = self._seed + 1 if begun else self._seed
        # The first batch tells the user why nothing else happens for a while.
        level = logging.DEBUG if begun else logging.INFO
        # Text number i has the beginning number i, in turns.
        turns = range(begun, begun + count)
        beginnings = tuple(self._beginnings[turn % len(self._beginnings)] for turn in turns)
        arguments = tokens, seed, beginnings, level
        batch = compute_once(self._model, _write_batch, *arguments, reference=self.reference)
        self.written = torch.cat([self.written, batch.to(self.written.device)])


@torch.no_grad()
def write_own_text(
    model: nn.Module,
    texts: int = 32,
    tokens: int = 256,
    seed: int = 0,
    beginnings: Sequence[Sequence[int]] | None = None,
    reference: str | None = None,
) -> Tensor:
    """Sample texts, LongTensor [n, L], from the distribution of the base or another reference.

    The temperature is 1. Adapters in training are disabled during the call; torch's random state is
    not used.

    Args:
        model: a causal language model, plain or with adapters.
        texts: n; all are sampled in one batch, by `seed`.
        tokens: L, those of the beginning included; within the model's positions.
        beginnings: token ids, 1 to L of each, that the texts begin with, in turns. None for the
            model's start-of-text token. With the first words of some text, the samples are of its
            language and kind.
        reference: the adapter that writes, with the base; None for the base alone.

    Raises:
        ValueError: for a model whose config names no token that a text could start with, and
            beginnings of another length.
    """
    check_whole("texts", texts, 1)
    check_whole("tokens", tokens, 2)
    base = CausalLM(model).base
    host = CausalLM(base, cpu_attention=False)
    complete = _complete_beginnings(host, beginnings, tokens)
    prompts = [complete[number % len(complete)] for number in range(texts)]
    choose = draw(1.0, torch.Generator(host.device).manual_seed(seed))
    most_new = tokens - min(map(len, prompts))
    with evaluating(base), reference_active(model, reference):
        # No stop token: after the end of one sample, another one follows, as in training text.
        written = continue_rows(host, prompts, most_new, choose=choose)
    rows = [[*prompt, *ids][:tokens] for prompt, ids in zip(prompts, written, strict=True)]
    return torch.tensor(rows, device=host.device)


def _write_batch(
    model: nn.Module,
    tokens: int,
    seed: int,
    beginnings: tuple[tuple[int, ...], ...],
    level: int,
    reference: str | None,
) -> Tensor:
    writer = "the base" if reference is None else "the memory as it was"
    message = "%s writes %d texts of %d tokens for the anchor"
    _logger.log(level, message, writer, len(beginnings), tokens)
    return write_own_text(model, len(beginnings), tokens, seed, beginnings, reference)


def _complete_beginnings(
    host: CausalLM, beginnings: Sequence[Sequence[int]] | None, tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return the beginnings of texts of so many tokens, after checks; the start token for None."""
    if beginnings is None:
        return ((_find_first_token(host),),)
    complete = tuple(map(tuple, beginnings))
    lengths = [len(beginning) for beginning in complete] or [0]
    if not 1 <= min(lengths) <= max(lengths) <= tokens:
        rule = f"beginnings must have 1 to {tokens} tokens each"
        raise ValueError(f"{rule}, got {min(lengths)} to {max(lengths)}: give others, or none")
    return complete


def _find_first_token(host: CausalLM) -> int:
    """Return the token that begins a text: a start token or, without one, an end token."""
    for config in (host.base.config.get_text_config(), host.base.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(config, name, None)
            if isinstance(token, (list, tuple)) and token:
                token = token[0]
            # The config may be of a larger vocabulary.
            if isinstance(token, int) and 0 <= token < host.vocabulary:
                return token
    rule = (
        "model's config must name a bos_token_id, eos_token_id or pad_token_id to write text from"
    )
    remedy = "set one, give Anchor texts of your own, or learn without an anchor"
    raise ValueError(f"{rule}, got none in its vocabulary: {remedy}")


def _check_texts(texts: Any) -> None:
    remedy = "make it with write_own_text(model)"
    if not isinstance(texts, Tensor):
        rule = "anchor texts must be a LongTensor of shape [n, L]"
        raise TypeError(f"{rule}, got {type(texts).__name__}: {remedy}")
    if texts.dtype != torch.int64:
        rule = "anchor texts must be a LongTensor of shape [n, L]"
        raise TypeError(f"{rule}, got {texts.dtype}: {remedy}")
    if texts.ndim != 2 or not len(texts) or texts.shape[1] < 2:
        rule = "anchor texts must have the shape [n, L] with n >= 1 and L >= 2"
        raise ValueError(f"{rule}, got {list(texts.shape)}: make them with write_own_text(model)")
