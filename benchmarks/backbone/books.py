"""Plain-text books to token ids: load, unwrap, train or load the tokenizer, encode."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from locas_peft.text import load_text, tokenize, unwrap

VOCABULARY_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"


def load_books(directory: Path) -> dict[str, str]:
    """Load every `.txt` file of a directory, paragraphs unwrapped, in the order of the names.

    Args:
        directory: of UTF-8 files.

    Returns:
        File name without its ending -> text.

    Raises:
        ValueError: the directory holds no book, or a book is empty or not UTF-8.
    """
    books = {path.stem: unwrap(load_text(path)) for path in sorted(directory.glob("*.txt"))}
    if not books:
        raise ValueError(f"no .txt file in {directory}: give a directory of plain-text books")
    return books


def train_tokenizer(books: dict[str, str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `VOCABULARY_SIZE` tokens; token 0 ends a text and pads."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        # Every byte has a token of its own, so that no text is out of vocabulary.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(books.values(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer saved by an earlier run, so that several backbones share one.

    Raises:
        ValueError: the directory holds no tokenizer, or one without an end-of-text token.
    """
    if not (directory / "tokenizer.json").is_file():
        raise ValueError(
            f"no tokenizer.json in {directory}: give the output folder of an earlier run"
        )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in {directory} has no end-of-text token, which separates documents: give another one"
        )
    return tokenizer


def encode_books(
    tokenizer: PreTrainedTokenizerBase, books: dict[str, str]
) -> dict[str, torch.Tensor]:
    """Encode each book to a `LongTensor [tokens]`, the end-of-text token last."""
    end = torch.tensor([tokenizer.eos_token_id])
    return {name: torch.cat([tokenize(tokenizer, text), end]) for name, text in books.items()}
