"""Ask a model with a memory: ask, chat, generate."""

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from .console import open_consoles, printable, without_controls, write_result
from .options import (
    ANSWERER,
    BASE,
    AnswererGroup,
    AnswererOptions,
    AtLeastZero,
    BaseOptions,
    Count,
    JsonFile,
    Memory,
    MemoryBase,
    Seed,
    Text,
)


def generate(
    prompt: Text,
    /,
    *,
    memory: Memory,
    max_new_tokens: Count = 64,
    temperature: AtLeastZero = 0.0,
    raw: bool = False,
    seed: Seed = 0,
    json_file: JsonFile = None,
    base: MemoryBase = BASE,
) -> None:
    """Continue a prompt without and with a memory.

    Args:
        prompt: the beginning of the text, or, for a model with a chat template, the user's message.
        max_new_tokens: the most tokens to write.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        raw: continue the prompt as it is, without the chat template. Special tokens that it spells
            are text.
        seed: of the tokens that are drawn.
    """
    from locas_peft.asking import (
        can_chat,
        check_room,
        continue_texts,
        encode_beginning,
        encode_prompt,
    )

    from .running import open_with_base

    stdout, _ = open_consoles(json_file)
    if not prompt.strip():
        raise ValueError("PROMPT must not be empty: give the beginning of a text")
    _check_utf8("PROMPT", prompt)
    loaded, adapted = open_with_base(memory, base)
    is_chat = not raw and can_chat(loaded.tokenizer)
    if is_chat:
        ids = encode_prompt(loaded.tokenizer, prompt)
    else:
        ids = encode_beginning(loaded.tokenizer, prompt)
    check_room(loaded.model, ids, max_new_tokens, "prompt", "--max-new-tokens")
    options: dict[str, Any] = {"temperature": temperature, "seed": seed}
    with adapted.disable_adapter():
        (without,) = continue_texts(adapted, loaded.tokenizer, [ids], max_new_tokens, **options)
    (with_memory,) = continue_texts(adapted, loaded.tokenizer, [ids], max_new_tokens, **options)
    for title, continuation in (("without the memory", without), ("with the memory", with_memory)):
        stdout.print(title, style="bold")
        written = continuation.strip("\n") if is_chat else prompt + continuation
        stdout.print(without_controls(written) + "\n")
    write_result(
        json_file,
        {"prompt": prompt, "memory_dir": str(memory), "without": without, "with": with_memory},
    )


def ask(
    *question: Annotated[str, Parameter(allow_leading_hyphen=False)],
    questions: Path | None = None,
    context: Path | None = None,
    max_new_tokens: Count = 64,
    json_file: JsonFile = None,
    answerer: AnswererGroup = ANSWERER,
    base: MemoryBase = BASE,
) -> None:
    """Ask a model questions about what it has read; it answers each in one sentence.

    Args:
        question: the questions, each in quotes; where no argument has a space, all together are one
            question.
        questions: a JSON Lines file with more, an object a line: question and, if known, answer.
        context: a text file that the model sees before each question.
        max_new_tokens: the longest answer, in tokens.
    """
    from locas_peft.asking import count_right
    from locas_peft.text import load_text

    stdout, _ = open_consoles(json_file)
    asked = _list_questions(question, questions)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if context is not None:
        options["context"] = load_text(context)
    loaded, model = _load_answerer(answerer, base, options)
    with _options_named():
        answers = model.answer(asked)
    if answerer.source:
        answers = _add_sources(answers, loaded, answerer)
    records = []
    for answer in answers:
        record = {
            "question": answer.question.question,
            "answer": answer.text,
            "gold": answer.question.answer,
            "right": answer.right,
        }
        if answerer.library is not None:
            record["memories"] = list(answer.memories)
        if answerer.source:
            record["source"] = answer.source
        records.append(record)
        _show_answer(answer, stdout, named=answerer.library is not None)
        if answerer.source:
            _show_source(answer, stdout)
    graded = [answer for answer in answers if answer.right is not None]
    if graded:
        stdout.print(f"{count_right(graded)} of {len(graded)} right")
    write_result(json_file, records)


def _list_questions(arguments: Sequence[str], file: Path | None) -> list[Any]:
    """Return the questions of the arguments and of a file; a `ValueError` for none, or bad ones."""
    from locas_peft.asking import Question, load_questions

    asked = [Question(text) for text in _join_words(arguments)]
    if file is not None:
        asked += load_questions(file)
    if not asked or any(not item.question.strip() for item in asked):
        raise ValueError(
            "QUESTION must be given and not be empty: ask one, or give --questions FILE"
        )
    for item in asked:
        _check_utf8("QUESTION", item.question)
    return asked


def _check_utf8(name: str, text: str) -> None:
    """Raise a `ValueError` for a text with bytes that are not UTF-8: lone surrogates in Python."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(
            f"{name} must be valid UTF-8, got {text!r}: "
            "convert it, for instance with iconv -t UTF-8"
        )


def _join_words(arguments: Sequence[str]) -> list[str]:
    """Return the questions: all arguments as one, where it was typed without quotes."""
    if arguments and all(len(argument.split()) == 1 for argument in arguments):
        return [" ".join(arguments)]
    return list(arguments)


def _show_answer(answer: Any, stdout: Console, named: bool) -> None:
    """Print a question, the answer and its gold answer; where `named`, the memory too."""
    stdout.print(without_controls(answer.question.question), style="bold")
    if named:
        _show_memories(answer, stdout)
    line = answer.text
    if answer.right is not None:
        line += f"   ({answer.question.answer})"
    stdout.print(without_controls(line))


def _show_memories(answer: Any, stdout: Console) -> None:
    names = ", ".join(answer.memories) or "no memory"
    stdout.print(f"  [{names}]", style="dim", markup=False)


def _add_sources(answers: Sequence[Any], loaded: Any, answerer: AnswererOptions) -> list[Any]:
    """Return answers with the sentences of the memories' texts that support them."""
    from locas_peft.library import Library, add_sources

    folders = []
    for answer in answers:
        folder = answerer.memory
        if answerer.library is not None and answer.memories:
            folder = Library(answerer.library).find(answer.memories[0])
        folders.append(folder)
    return add_sources(loaded.model, loaded.tokenizer, answers, folders)


def _show_source(answer: Any, stdout: Console) -> None:
    source = "none" if answer.source is None else printable(answer.source)
    stdout.print(f"  source: {source}", style="dim")


def chat(
    *,
    max_new_tokens: Count = 128,
    temperature: AtLeastZero = 0.0,
    seed: Seed = 0,
    answerer: AnswererGroup = ANSWERER,
    base: MemoryBase = BASE,
) -> None:
    """Talk with a model about what it has read: one message a line; /exit ends it.

    A message that cannot be answered, such as one that is too long, is left out with an error.

    Args:
        max_new_tokens: the longest reply, in tokens.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        seed: of the tokens that are drawn.
    """
    from locas_peft.asking import can_chat

    stdout, stderr = open_consoles()
    options = {"max_new_tokens": max_new_tokens}
    loaded, model = _load_answerer(answerer, base, options)
    if not can_chat(loaded.tokenizer):
        raise ValueError(
            f"model must have a chat template, got {loaded.name!r} without one: use locas generate"
        )
    turns: list[dict[str, str]] = []
    for message in _read_messages(stderr):
        turns.append({"role": "user", "content": message})
        try:
            _check_utf8("message", message)
            with _options_named():
                (reply,) = model.reply([turns], temperature=temperature, seed=seed)
        except ValueError as error:
            # The turns before it are kept.
            turns.pop()
            stderr.print(f"error: {printable(str(error))}")
            continue
        if answerer.source:
            (reply,) = _add_sources([reply], loaded, answerer)
        turns.append({"role": "assistant", "content": reply.text})
        if answerer.library is not None:
            _show_memories(reply, stdout)
        stdout.print(without_controls(reply.text))
        if answerer.source:
            _show_source(reply, stdout)


def _read_messages(stderr: Console) -> Iterator[str]:
    """Yield the lines of standard input that are not empty, until /exit or its end."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A message that is not UTF-8 must not end the chat.
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        if sys.stdin.isatty():
            stderr.print("> ", end="")
        line = sys.stdin.readline()
        message = line.strip()
        if not line or message == "/exit":
            return
        if message:
            yield message


@contextmanager
def _options_named() -> Iterator[None]:
    """Name options, as they were given, in errors that name the arguments of an `Answerer`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("max_new_tokens", "--max-new-tokens")) from error


def _load_answerer(
    answerer: AnswererOptions, base: BaseOptions, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Load a base and what it is asked with, if anything; return the base, and what answers."""
    from locas_peft.asking import Answerer
    from locas_peft.library import LibraryAnswerer, check_text

    from .running import load, load_base_of, open_library, open_with_base

    memory = answerer.memory
    library = answerer.library
    without_memory = answerer.without_memory
    if answerer.source and without_memory:
        what = "--source quotes the text of a memory, got --without-memory too"
        raise ValueError(f"{what}: leave one of them out")
    if answerer.source and memory is not None and memory.is_dir():
        check_text(memory)
    if library is not None:
        if memory is not None or without_memory:
            other = "--without-memory" if without_memory else "--memory"
            raise ValueError(
                f"--library chooses the memory itself, got {other} too: leave one of them out"
            )
        shelf, loaded = open_library(library, base)
        return loaded, LibraryAnswerer(shelf, loaded.model, loaded.tokenizer, **options)
    if memory is None and not (without_memory and base.model):
        remedy = "give it, or --library, or --without-memory with --model"
        raise ValueError(f"--memory must name a memory's folder, got none: {remedy}")
    if memory is not None and not without_memory:
        loaded, model = open_with_base(memory, base)
        return loaded, Answerer(model, loaded.tokenizer, **options)
    loaded = load(base) if memory is None else load_base_of(memory, base)
    return loaded, Answerer(loaded.model, loaded.tokenizer, **options)
