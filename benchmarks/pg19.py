"""Online perplexity of whole books: the paper's PG-19 tables on the embedded backbones, or on any causal LM.

    python benchmarks/pg19.py --books eval --books train/2118.txt --table all --plot
    python benchmarks/pg19.py --books eval --books train/2118.txt --table all --quick
    python benchmarks/pg19.py --books eval --table headline --rows none,lora --documents 3649
    python benchmarks/pg19.py --dataset emozilla/pg19-test --model Qwen/Qwen3-0.6B --window 2048 --stride 1024
    python benchmarks/pg19.py --shapes qwen3-0.6b,qwen3-1.7b --device cuda --dtype bfloat16

Each chunk is scored before it is learned. Each reading has a result, OUT/readings/DOCUMENT/ROW-seedN-TOKENS.json. A
second call continues where the first one was stopped, also inside a book, and the processes of `accelerate launch` share
the work. The tables are made of all results in the folder, printed, and written to OUT/pg19.md; OUT/pg19.json has all
figures but those of single chunks. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pg19_report
import pg19_timing
import torch
import transformers
from measuring import SHAPES, describe_machine, draw_tokens, load_shape
from pg19_rows import BLOCKS, HEADLINE, NONE, NONE_RECOMPUTE, TABLES, TRAINING, TUNING, Row, Table

from locas_peft import backbone, stages
from locas_peft.bases import choose_device, load_base
from locas_peft.evaluation import Unit, run_units
from locas_peft.evaluation.documents import load_column, load_documents
from locas_peft.files import check_output_directory, load_json, write_json
from locas_peft.memories import memory_attached
from locas_peft.memories.checkpoint import has_checkpoint
from locas_peft.model import count_positions
from locas_peft.processes import in_first_process, join_processes
from locas_peft.stages import Place, ReadSettings, score
from locas_peft.text import digest_ids, tokenize, unwrap

QUICK_TOKENS = 1_000
TABLE_NAMES = [*TABLES, "timing", *BLOCKS]
UNUSED_FIGURES = ("curve", "memory_dir", "peak_bytes", "perplexities", "tokens_per_second")


class Texts:
    """The documents of a call, the base that reads them, and the settings that all rows share."""

    def __init__(self, arguments: argparse.Namespace):
        texts = load_texts(arguments)
        self.names = list(texts)
        self.base, tokenizer = load_base(arguments.model, arguments.dtype, arguments.device)
        self.common = ReadSettings(
            method="none",
            model=backbone.name_of(arguments.model),
            window=arguments.window or 512,
            stride=arguments.stride or 256,
            dtype=str(self.base.dtype).removeprefix("torch."),
        )
        prepare = unwrap if backbone.is_embedded(arguments.model) else str
        self.ids: Callable[[str], torch.Tensor] = cache(
            lambda name: tokenize(tokenizer, prepare(texts[name]))
        )

    def choose(self, own: Sequence[str], chosen: list[str] | None) -> list[str]:
        """Return the documents for a table: those chosen by `--documents`, else the table's own, else all.

        Raises:
            ValueError: a chosen document is missing, or all of the table's own where others of our books are given.
        """
        for name in chosen or ():
            if name not in self.names:
                raise ValueError(
                    f"--documents must be among {', '.join(self.names)}, got {name!r}: check the name"
                )
        if chosen or set(self.names).isdisjoint((*HEADLINE, TUNING, TRAINING)):
            return chosen or self.names
        found = [name for name in own if name in self.names]
        if not found:
            given = ", ".join(self.names)
            raise ValueError(
                f"--books must hold one of {', '.join(own)} for this table, got {given}: add it"
            )
        return found


def load_texts(arguments: argparse.Namespace) -> dict[str, str]:
    if arguments.dataset:
        return load_column(arguments.dataset, arguments.split, arguments.column, arguments.limit)
    if not arguments.books:
        raise ValueError(
            "--books must name text files or folders of them, got none: give it, or --dataset"
        )
    return load_documents(arguments.books, arguments.limit)


def choose_rows(
    rows: Iterable[Any], chosen: list[str] | None, always: Sequence[str] = ()
) -> list[Any]:
    """Return the rows whose names begin with one of `chosen` (all rows where None), and those named in `always`."""
    rows = list(rows)
    for start in chosen or ():
        if not any(row.name.startswith(start) for row in rows):
            names = "; ".join(row.name for row in rows)
            raise ValueError(
                f"--rows must be beginnings of names, got {start!r}: choose among {names}"
            )
    return [
        row
        for row in rows
        if not chosen or row.name.startswith(tuple(chosen)) or row.name in always
    ]


def keep_what_fits(
    base: transformers.PreTrainedModel, rows: Iterable[Row], common: ReadSettings
) -> list[Row]:
    """Leave out rows whose window is larger than the model's positions; name them on stderr."""
    kept, limit = [], count_positions(base)
    for row in rows:
        if limit is None or row.windows * common.window <= limit:
            kept.append(row)
        else:
            print(
                f"left out: {row.name}, beyond the model's {limit:,} positions",
                file=sys.stderr,
                flush=True,
            )
    return kept


# ---------------------------------------------------------------------- readings


def fill_readings(name: str, texts: Texts, arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the missing results of a table of readings; return its figures, with the table as `markdown`."""
    table = TABLES[name].shorten(arguments.tokens)
    documents = texts.choose(table.documents, arguments.documents)
    for unread in table.unread:
        if unread not in texts.names:
            raise ValueError(
                f"--books must hold {unread!r}, which is left unread in --table {name}: add the file"
            )
    rows = keep_what_fits(texts.base, table.rows, texts.common)
    wanted = choose_rows(table.rows, arguments.rows)
    if not arguments.collect:
        units = [
            make_unit(texts, table, row, document, seed, arguments.out)
            for row in rows
            if row in wanted
            for document in (documents[:1] if arguments.quick else documents)
            for seed in range(min(row.seeds, arguments.seeds or row.seeds))
        ]
        run_units(units, show_progress)
    documents = dict.fromkeys((*texts.choose(table.documents, None), *documents))
    paths = (
        result_path(arguments.out, table, row, document, seed)
        for row in rows
        for document in documents
        for seed in range(row.seeds)
    )
    readings = [load_json(path) for path in paths if path.exists()]
    return {"markdown": pg19_report.to_markdown(name, readings), "readings": readings}


def result_path(out: Path, table: Table, row: Row, document: str, seed: int) -> Path:
    slug = re.sub(r"[^\w.@-]+", "_", row.name)
    unread = "-unread" if table.unread else ""
    return out / "readings" / document / f"{slug}-seed{seed}-{table.tokens or 'all'}{unread}.json"


def make_unit(texts: Texts, table: Table, row: Row, document: str, seed: int, out: Path) -> Unit:
    """Make the unit of one reading; refuse a result of other settings or of another text."""
    path, ids = result_path(out, table, row, document, seed), texts.ids(document)[: table.tokens]
    settings = row.settings(texts.common, seed, table.tokens)
    unread = {name: texts.ids(name)[: table.unread_tokens] for name in table.unread}
    if path.exists():
        check_same(path, settings, ids, document)

    def make() -> dict[str, Any]:
        figures = read(texts.base, ids, settings, unread, unit.checkpoint)
        print(
            f"{document}: {row.name}, seed {seed}: {figures['perplexity']:.3f}, {figures['seconds']:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        head = {"row": row.name, "document": document, "tokens_read": len(ids)}
        return {**head, **figures, "unread_tokens": table.unread_tokens}

    unit = Unit(path, make)
    return unit


def read(
    base: transformers.PreTrainedModel,
    ids: torch.Tensor,
    settings: ReadSettings,
    unread: dict[str, torch.Tensor],
    checkpoint_dir: Path,
) -> dict[str, Any]:
    """Read a document [T], then score the first tokens of others [T] with the memory frozen."""
    resumed, chunks = has_checkpoint(checkpoint_dir), []
    began, processor = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        memory = Path(folder) / "memory"
        place = Place(out=memory, checkpoint_dir=checkpoint_dir, resume=True)
        reading = stages.read(base, ids, settings, place, on_step=chunks.append)
        seconds, processor_seconds = time.perf_counter() - began, time.process_time() - processor
        with (
            nullcontext(base)
            if settings.method == "none"
            else memory_attached(base, memory) as model
        ):
            unread_perplexities = {
                name: score(model, text, settings) for name, text in unread.items()
            }
        adapter_bytes = sum(file.stat().st_size for file in memory.glob("*.safetensors"))
    return {
        **{key: item for key, item in reading.to_json().items() if key not in UNUSED_FIGURES},
        # Three numbers a chunk: tokens read so far, tokens scored in the chunk, and their nll.
        "chunks": [
            number
            for chunk in chunks
            for number in (chunk.stop, chunk.tokens, round(chunk.nll_nats, 4))
        ],
        "unread": unread_perplexities,
        "adapter_bytes": adapter_bytes,
        # Not known for a reading that was interrupted.
        "total_seconds": None if resumed else seconds,
        "processor_seconds": None if resumed else processor_seconds,
    }


def check_same(path: Path, settings: ReadSettings, ids: torch.Tensor, document: str) -> None:
    recorded = load_json(path)
    # Older versions did not record all settings.
    known = {key: item for key, item in vars(settings).items() if recorded.get(key) is not None}
    check_fields(known, recorded, path)
    if recorded["text_sha256"] != digest_ids(ids):
        raise ValueError(
            f"{str(path)!r} is of another text named {document!r}: choose another --out"
        )


def check_fields(fields: dict[str, Any], recorded: dict[str, Any], path: Path) -> None:
    for name, value in fields.items():
        if value != recorded.get(name):
            raise ValueError(
                f"{name} must be {recorded.get(name)!r} as in {str(path)!r}, got {value!r}: "
                "choose another --out, or delete that file"
            )


def show_progress(description: str, total: int) -> Callable[..., None]:
    """Print how many results are left, when one was made: a `Progress` for `run_units`."""

    def advance(steps: int, note: str = "") -> None:
        if steps:
            print(note, file=sys.stderr, flush=True)

    return advance


# ---------------------------------------------------------------------- times


def fill_timing(name: str, texts: Texts, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the cost of the headline's rows, unless the results are only collected."""
    path = arguments.out / "timing.json"
    if not arguments.collect:
        document = texts.choose((TUNING, *HEADLINE), arguments.documents)[0]
        load = partial(load_model, arguments.model, arguments.dtype, arguments.device)
        ids = texts.ids(document)
        about = {"document": document}
        in_first_process(
            lambda: measure(texts.base, load, texts.common, ids, arguments, path, about)
        )
    return with_markdown(path, pg19_report.timing_to_markdown)


def load_model(model: str, dtype: str, device: str) -> transformers.PreTrainedModel:
    return load_base(model, dtype, device)[0]


def measure(
    base: transformers.PreTrainedModel,
    load: Callable[[], transformers.PreTrainedModel],
    common: ReadSettings,
    ids: torch.Tensor,
    arguments: argparse.Namespace,
    path: Path,
    about: dict[str, Any],
) -> None:
    """Measure time and operations of the headline's rows, then memory; write each to the file when it is known."""
    # All times are relative to both `none`.
    wanted = choose_rows(
        TABLES["headline"].rows, arguments.rows, always=(NONE.name, NONE_RECOMPUTE.name)
    )
    rows = keep_what_fits(base, wanted, common)
    tokens, memory_tokens = (
        min(length, len(ids)) for length in measured_lengths(arguments, common.window)
    )
    value = {
        **about,
        "model": common.model,
        "dtype": common.dtype,
        "tokens": tokens,
        "memory_tokens": memory_tokens,
        "window": common.window,
        "stride": common.stride,
        **describe_machine(base.device),
        "rows": pg19_timing.time_rows(base, rows, common, ids[:tokens]),
    }
    write_json(path, value)
    memory = pg19_timing.measure_memory(load, rows, common, ids[:memory_tokens])
    write_json(path, {**value, "rows": [{**row, **memory[row["row"]]} for row in value["rows"]]})


def measured_lengths(arguments: argparse.Namespace, window: int) -> tuple[int, int]:
    """Return how many tokens are timed, and over how many the memory is measured."""
    timed = arguments.timing_tokens or (24 if arguments.quick else 48) * window
    return timed, arguments.memory_tokens or timed // 2


def fill_shape(shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the cost of the headline's rows on random weights of a known shape."""
    load = partial(load_shape, shape, arguments.dtype, arguments.device)
    base = load()
    window = arguments.window or (64 if shape == "tiny" else 2048)
    dtype, stride = str(base.dtype).removeprefix("torch."), arguments.stride or window // 2
    common = ReadSettings(method="none", model=shape, window=window, stride=stride, dtype=dtype)
    ids = draw_tokens(base, max(measured_lengths(arguments, window)))
    path = arguments.out / f"shapes-{shape}.json"
    in_first_process(lambda: measure(base, load, common, ids, arguments, path, {}))
    return with_markdown(path, pg19_report.timing_to_markdown)


def fill_block(name: str, texts: Texts, arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the book of a first block's table, unless the result exists."""
    path, block, common = arguments.out / f"{name}.json", BLOCKS[name], texts.common
    document = texts.choose((block.document,), arguments.documents)[0]
    rows = choose_rows(block.rows, arguments.rows)
    ids = texts.ids(document)[: min(block.tokens, arguments.tokens or block.tokens)]
    settings = {
        "document": document,
        "tokens": len(ids),
        "context": block.context,
        "window": common.window,
        "stride": common.stride,
        "rows": [f"{row.name}, {row.describe()}" for row in rows],
    }

    def make() -> dict[str, Any]:
        base, _ = load_base(backbone.MLP_NAME, device="cpu")
        results = pg19_timing.read_block(base, block, rows, common, ids)
        return {"settings": settings, "results": results, **describe_machine(base.device)}

    if not arguments.collect:
        run_units([Unit(path, make)])
        check_fields(settings, load_json(path)["settings"], path)
    return with_markdown(path, pg19_report.block_to_markdown)


def with_markdown(path: Path, to_markdown: Callable[[Any], str]) -> dict[str, Any]:
    if not path.exists():
        return {"markdown": pg19_report.EMPTY}
    value = load_json(path)
    return {"markdown": to_markdown(value), **value}


# ---------------------------------------------------------------------- the command

FILL: dict[str, Callable[[str, Texts, argparse.Namespace], dict[str, Any]]] = {
    **dict.fromkeys(TABLES, fill_readings),
    "timing": fill_timing,
    **dict.fromkeys(BLOCKS, fill_block),
}


def fill_tables(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Fill the tables and print them; return all figures but those of single chunks."""
    tables = {}
    is_first = join_processes().is_main_process
    texts = None if arguments.shapes else Texts(arguments)
    for name in arguments.shapes or arguments.table:
        tables[name] = (
            fill_shape(name, arguments) if texts is None else FILL[name](name, texts, arguments)
        )
        if is_first:
            print(f"## {name}\n\n{tables[name]['markdown']}\n", flush=True)
    if arguments.plot and texts is not None and is_first:
        for path in pg19_report.draw(tables, arguments.out):
            print(path, file=sys.stderr)
    return {
        name: {**table, **pg19_report.compact(table["readings"])}
        if table.get("readings")
        else table
        for name, table in tables.items()
    }


def split_names(value: str) -> list[str]:
    """Split at commas; a comma before a blank is part of a row's name."""
    return [name for name in re.split(r",(?! )", value) if name]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    texts = parser.add_argument_group("texts")
    texts.add_argument(
        "--books",
        action="append",
        metavar="PATH",
        help="a text file or a folder of them; repeatable",
    )
    texts.add_argument(
        "--dataset", help="in place of --books: a dataset on the hub, or a folder of one"
    )
    texts.add_argument("--split", default="test")
    texts.add_argument("--column", default="text")
    texts.add_argument("--limit", type=int, help="the number of documents to load, from the first")
    work = parser.add_argument_group("work")
    work.add_argument(
        "--table", default="headline", help=f"with commas: {', '.join(TABLE_NAMES)}; or all"
    )
    work.add_argument(
        "--shapes", type=split_names, help=f"times alone, on random weights: {', '.join(SHAPES)}"
    )
    work.add_argument(
        "--rows",
        type=split_names,
        help="only rows with these beginnings of names; with commas, no blanks",
    )
    work.add_argument("--documents", type=split_names, help="only these documents; with commas")
    work.add_argument(
        "--tokens", type=int, help="the most tokens of each document to read, from the first"
    )
    work.add_argument(
        "--timing-tokens", type=int, help="tokens that are timed (48 windows, --quick 24)"
    )
    work.add_argument(
        "--memory-tokens", type=int, help="tokens read to measure memory (half of those timed)"
    )
    work.add_argument("--seeds", type=int, help="the most seeds of each row")
    work.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_TOKENS:,} tokens, one document a table, one seed",
    )
    work.add_argument(
        "--collect", action="store_true", help="read nothing: tables of the results in --out"
    )
    work.add_argument(
        "--plot", action="store_true", help="draw the plots into --out (needs matplotlib)"
    )
    work.add_argument(
        "--out", type=Path, default=Path("benchmarks-pg19"), help="the folder of all results"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", default=backbone.NAME, help="a folder, or a name on the hub")
    model.add_argument("--dtype", default="auto")
    model.add_argument("--device", default="cpu")
    model.add_argument("--window", type=int, help="512; with --shapes 2,048")
    model.add_argument("--stride", type=int, help="256; with --shapes half the window")
    model.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    arguments.table = TABLE_NAMES if arguments.table == "all" else split_names(arguments.table)
    for option, known in (("table", TABLE_NAMES), ("shapes", list(SHAPES))):
        for name in getattr(arguments, option) or ():
            if name not in known:
                parser.error(f"--{option} must be among {', '.join(known)}, got {name!r}")
    if arguments.quick:
        arguments.tokens, arguments.seeds = arguments.tokens or QUICK_TOKENS, arguments.seeds or 1
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    # PEFT asks transformers for a property that transformers has renamed.
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    began = time.perf_counter()
    try:
        check_output_directory("--out", arguments.out)
        arguments.out.mkdir(parents=True, exist_ok=True)
        tables = fill_tables(arguments)
        name = "pg19-shapes" if arguments.shapes else "pg19"
        summary = {
            "benchmark": name,
            **describe_machine(choose_device(arguments.device)),
            "tables": tables,
        }
        markdown = "\n\n".join(
            f"## {title}\n\n{table['markdown']}" for title, table in tables.items()
        )
        summary_file = arguments.out / f"{name}.json"
        if join_processes().is_main_process:
            write_json(summary_file, {**summary, "seconds": time.perf_counter() - began})
            summary_file.with_suffix(".md").write_text(markdown + "\n", encoding="utf-8")
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(f"pg19: {error}")
    except KeyboardInterrupt:
        sys.exit("pg19: stopped; all results are kept, and the same command continues")
    if join_processes().is_main_process:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
