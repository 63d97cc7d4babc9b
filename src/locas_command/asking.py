"""Ask a model with a memory: ask, chat, generate."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from .console import open_consoles, write_result
from .options import (
    BASE,
    AtLeastZero,
    BaseOptions,
    Count,
    JsonFile,
    Memory,
    MemoryBase,
    NamedPath,
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
        raw: continue the prompt as it is, without the chat template.
        seed: of the tokens that are drawn.
    """
    from locas_peft.asking import can_chat, check_room, continue_texts, encode_prompt

    from .running import open_with_base

    stdout, _ = open_consoles(json_file)
    if not prompt.strip():
        raise ValueError("PROMPT must not be empty: give the beginning of a text")
    if any("\ud800" <= char <= "\udfff" for char in prompt):
        raise ValueError(
            f"PROMPT must be valid UTF-8, got {prompt!r}: convert it, for instance with iconv -t UTF-8"
        )
    loaded, adapted = open_with_base(memory, base)
    chat = not raw and can_chat(loaded.tokenizer)
    ids = encode_prompt(loaded.tokenizer, prompt) if chat else loaded.tokenizer(prompt)["input_ids"]
    check_room(loaded.model, ids, max_new_tokens, "prompt", "--max-new-tokens")
    options = {"temperature": temperature, "seed": seed}
    with adapted.disable_adapter():
        (without,) = continue_texts(adapted, loaded.tokenizer, [ids], max_new_tokens, **options)
    (with_memory,) = continue_texts(adapted, loaded.tokenizer, [ids], max_new_tokens, **options)
    for title, continuation in (("without the memory", without), ("with the memory", with_memory)):
        stdout.print(title, style="bold")
        stdout.print(("" if chat else prompt) + continuation.strip("\n" if chat else "") + "\n")
    write_result(
        json_file,
        {"prompt": prompt, "memory_dir": str(memory), "without": without, "with": with_memory},
    )


def ask(
    *question: Annotated[str, Parameter(allow_leading_hyphen=False)],
    memory: Memory | None = None,
    library: NamedPath | None = None,
    questions: Path | None = None,
    context: Path | None = None,
    without_memory: bool = False,
    recite: bool = False,
    passage: bool = False,
    max_new_tokens: Count = 64,
    json_file: JsonFile = None,
    base: MemoryBase = BASE,
) -> None:
    """Ask a model questions about what it has read; it answers each in one sentence.

    Args:
        question: the questions.
        questions: a JSON Lines file with more, an object a line: question and, if known, answer.
        library: a folder of memories: each question is answered with the one (--recite: five) that it is about.
        context: a text file that the model sees before each question.
        without_memory: ask the base model alone; --memory then only names it.
        recite: ten studied passages are found for each question, and the base answers from them in a few words.
        passage: the answer is the studied passage that is found for the question: more answers are right.
        max_new_tokens: the longest answer, in tokens; a passage that was studied is recited whole.
    """
    from locas_peft.asking import Question, ask_by_reciting, is_right, load_questions
    from locas_peft.asking import ask as ask_questions
    from locas_peft.selfstudy import load_finder
    from locas_peft.text import load_text

    stdout, _ = open_consoles(json_file)
    _check_recite(recite=recite, passage=passage, without_memory=without_memory, context=context)
    asked = [Question(text) for text in question]
    asked += [] if questions is None else load_questions(questions)
    if not asked or any(not item.question.strip() for item in asked):
        raise ValueError(
            "QUESTION must be given and not be empty: ask one, or give --questions FILE"
        )
    text = None if context is None else load_text(context)
    by = partial(ask_by_reciting, passage=passage) if recite or passage else ask_questions
    options = {"max_new_tokens": max_new_tokens} | (
        {"context": text} if by is ask_questions else {}
    )
    recited, routed = [[] for _ in asked], None
    loaded, model, found = _load_to_ask(memory, library, without_memory, base)
    if found is not None:
        given = found.ask(loaded.model, loaded.tokenizer, asked, by=by, **options)
        answers, recited, routed = zip(
            *((each.answer, each.recited, each.memories) for each in given), strict=True
        )
    elif by is ask_questions:
        answers = by(model, loaded.tokenizer, asked, **options)
    else:
        answers, recited = by(
            model, loaded.tokenizer, asked, load_finder(memory, model, loaded.tokenizer), **options
        )
    records = [
        {
            "question": item.question,
            "answer": answer,
            "gold": item.answer,
            "right": None if item.answer is None else is_right(answer, item.answer),
            **({} if by is ask_questions else {"recited": list(passages)}),
            **({} if routed is None else {"memories": list(routed[number])}),
        }
        for number, (item, answer, passages) in enumerate(zip(asked, answers, recited, strict=True))
    ]
    for record in records:
        stdout.print(record["question"], style="bold")
        if routed is not None:
            stdout.print(
                f"  [{', '.join(record['memories']) or 'no memory'}]", style="dim", markup=False
            )
        stdout.print(
            record["answer"] + ("" if record["right"] is None else f"   ({record['gold']})")
        )
        for passage in (
            (record["recited"] or ["no passage is about this"]) if "recited" in record else ()
        ):
            stdout.print(f"  {passage}", style="dim")
    graded = [record["right"] for record in records if record["right"] is not None]
    if graded:
        stdout.print(f"{sum(graded)} of {len(graded)} right")
    write_result(json_file, records)


def chat(
    *,
    memory: Memory | None = None,
    library: NamedPath | None = None,
    without_memory: bool = False,
    recite: bool = False,
    max_new_tokens: Count = 128,
    temperature: AtLeastZero = 0.0,
    seed: Seed = 0,
    base: MemoryBase = BASE,
) -> None:
    """Talk with a model about what it has read: one message a line; /exit or the end of the input ends it.

    Args:
        library: a folder of memories: each message is replied to with the one that it is about, if any (see ask).
        without_memory: talk with the base model alone; --memory then only names it.
        recite: ten studied passages are found for each message, and the base replies with these before it.
        max_new_tokens: the longest reply, in tokens.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        seed: of the tokens that are drawn.
    """
    from locas_peft.asking import Question, can_chat, check_room, continue_texts, fit_turns
    from locas_peft.asking.prompts import encode_question, put_before
    from locas_peft.model import count_positions
    from locas_peft.selfstudy import load_finder
    from locas_peft.tuner import adapters_disabled

    stdout, stderr = open_consoles()
    _check_recite(recite=recite, without_memory=without_memory)
    loaded, model, found = _load_to_ask(memory, library, without_memory, base)
    if not can_chat(loaded.tokenizer):
        raise ValueError(
            f"model must have a chat template, got {loaded.name!r} without one: use locas generate"
        )
    turns: list[dict[str, str]] = []
    positions, drawn = count_positions(loaded.model), {"temperature": temperature, "seed": seed}
    own = load_finder(memory, model, loaded.tokenizer) if recite and found is None else None

    def write(
        model: Any, names: tuple, numbers: list[int]
    ) -> list[tuple[list[int], str, list[str]]]:
        recites, passages = (
            recite and bool(names) and (own is not None or found.has_studied(names[0])),
            list[str](),
        )
        if recites:
            passages = list(
                (own or found.load_finder(names, model, loaded.tokenizer))([message])[0]
            )
        asked = {"role": "user", "content": put_before("\n".join(passages)) + message}
        ids = fit_turns(
            loaded.tokenizer,
            [*turns, asked],
            None if positions is None else positions - max_new_tokens,
        )
        check_room(model, ids, max_new_tokens, "message", "--max-new-tokens")
        with adapters_disabled(model) if recites else nullcontext():
            (reply,) = continue_texts(model, loaded.tokenizer, [ids], max_new_tokens, **drawn)
        return [
            (
                encode_question(loaded.tokenizer, message) if recites else ids,
                reply.strip(),
                passages,
            )
        ]

    while True:
        if sys.stdin.isatty():
            stderr.print("> ", end="")
        line = sys.stdin.readline()
        message = line.strip()
        if not line or message == "/exit":
            return
        if not message:
            continue
        if found is None:
            reply = write(model, (memory,), [0])[0][1]
        else:
            (answer,) = found.answer(
                loaded.model, loaded.tokenizer, [Question(message)], write, several=recite
            )
            reply = answer.answer
            stdout.print(
                f"  [{', '.join(answer.memories) or 'no memory'}]", style="dim", markup=False
            )
        turns += [{"role": "user", "content": message}, {"role": "assistant", "content": reply}]
        stdout.print(reply)


def _check_recite(**options: Any) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if len(given) > 1 and given[0] in ("--recite", "--passage"):
        raise ValueError(
            f"{given[0]} needs the memory and nothing else to answer from, got {given[1]}: leave one out"
        )


def _load_to_ask(
    memory: Path | None, library: Path | None, without_memory: bool, base: BaseOptions
) -> tuple:
    """Load a base and, unless it is asked alone, the memory; return the base, the model that is asked, the library."""
    from .running import load, load_base_of, open_library, open_with_base

    if library is not None:
        if memory is not None or without_memory:
            other = "--without-memory" if without_memory else "--memory"
            raise ValueError(
                f"--library chooses the memory itself, got {other} too: leave one of them out"
            )
        found, loaded = open_library(library, base)
        return loaded, loaded.model, found
    if memory is None and not (without_memory and base.model):
        remedy = "give it, or --library, or --without-memory with --model"
        raise ValueError(f"--memory must name a memory's folder, got none: {remedy}")
    if not without_memory:
        return *open_with_base(memory, base), None
    loaded = load(base) if memory is None else load_base_of(memory, base)
    return loaded, loaded.model, None
