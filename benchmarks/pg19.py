"""Online perplexity of whole books: the paper's PG-19 tables on the embedded backbones, or on any causal LM.

    python benchmarks/pg19.py --books eval --books train/2118.txt --table all --plot
    python benchmarks/pg19.py --books eval --books train/2118.txt --table all --quick
    python benchmarks/pg19.py --books eval --table headline --rows none,lora --documents 3649
    python benchmarks/pg19.py --dataset emozilla/pg19-test --model Qwen/Qwen3-0.6B --window 2048 --stride 1024
    python benchmarks/pg19.py --shapes qwen3-0.6b,qwen3-1.7b --device cuda --dtype bfloat16

Each chunk is scored before it is learned. What is read goes to --out, a file each reading: a second call goes on where
the first was stopped, several calls can share the work by --rows and --documents, and the tables are made of whatever
lies there. They are printed and written to OUT/pg19.md; OUT/pg19.json has all figures but those of single chunks. The
last line printed is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pg19_first_block
import pg19_plots
import pg19_report
import pg19_shapes
import pg19_timing
import torch
import transformers
from machine import describe_machine
from pg19_quality import collect, list_jobs, read_jobs
from pg19_rows import APART, HEADLINE, NONE, NONE_RECOMPUTE, TABLES, TRAINING, Row, shorten

from locas_peft import backbone, loading
from locas_peft.files import check_output_directory, write_json
from locas_peft.methods import Settings
from locas_peft.studies.documents import load_column, read_documents
from locas_peft.text import tokenize, unwrap
from locas_peft.ttt.host import Host

QUICK_TOKENS = 1_000
TABLE_NAMES = [*TABLES, "timing", *pg19_first_block.BLOCKS]


def choose_documents(own: tuple[str, ...], names: list[str], chosen: list[str] | None) -> list[str]:
    """Gives the documents to read for a table: those chosen, else the table's own, else all.

    Args:
        own: the table's books, of our collection.
        names: what is at hand.
        chosen: by `--documents`.

    Raises:
        ValueError: a chosen one is not at hand, or none of the table's books is where others of ours are.
    """
    for name in chosen or ():
        if name not in names:
            raise ValueError(f"--documents must be among {', '.join(names)}, got {name!r}: check the name")
    if chosen:
        return chosen
    if set(names).isdisjoint((*HEADLINE, APART, TRAINING)):
        return names
    found = [name for name in own if name in names]
    if not found:
        raise ValueError(f"--books must hold one of {', '.join(own)} for this table, got {', '.join(names)}: add it")
    return found


def choose_rows(names: list[str], chosen: list[str] | None) -> set[str]:
    """Gives the rows whose names begin with a chosen word.

    Raises:
        ValueError: no name begins so.
    """
    for start in chosen or ():
        if not any(name.startswith(start) for name in names):
            raise ValueError(f"--rows must be beginnings of names, got {start!r}: choose among {'; '.join(names)}")
    return {name for name in names if not chosen or name.startswith(tuple(chosen))}


class Run:
    """One call of the command on texts: what is at hand, and how each kind of table is filled from it."""

    def __init__(self, arguments: argparse.Namespace):
        self._arguments, self._texts = arguments, _load_texts(arguments)
        self._load = partial(load_model, arguments.model, arguments.dtype, arguments.device)
        self._base, self._tokenizer = loading.load_base(arguments.model, arguments.dtype, arguments.device)
        self._get_ids = cache(self._tokenize)
        self.common = Settings(
            method="none",
            model=backbone.name_of(arguments.model),
            window=arguments.window or 512,
            stride=arguments.stride or 256,
            dtype=str(self._base.dtype).removeprefix("torch."),
        )

    def fill(self, name: str) -> dict[str, Any]:
        """Reads what a table lacks; gives its figures as JSON values, with its Markdown as `markdown`."""
        if name == "timing":
            return self._fill_timing()
        if name in pg19_first_block.BLOCKS:
            return self._fill_block(name)
        return self._fill_readings(name)

    def _fill_readings(self, name: str) -> dict[str, Any]:
        arguments = self._arguments
        table = TABLES[name] if arguments.tokens is None else shorten(TABLES[name], arguments.tokens)
        documents = self._choose_documents(table.documents)
        missing = [document for document in table.unread if document not in self._texts]
        if missing:
            raise ValueError(f"--books must hold {missing[0]!r}, which is left unread in --table {name}: add the file")
        wanted = choose_rows([row.name for row in table.rows], arguments.rows)
        rows = tuple(keep_what_fits(self._base, table.rows, self.common))
        table = dataclasses.replace(table, rows=rows, documents=tuple(documents[:1] if arguments.quick else documents))
        if not arguments.collect:
            jobs = [job for job in list_jobs(table, arguments.seeds) if job.row.name in wanted]
            read_jobs(self._base, jobs, self.common, self._get_ids, arguments.out)
        everything = dict.fromkeys((*choose_documents(TABLES[name].documents, list(self._texts), None), *documents))
        readings = list(collect(list_jobs(dataclasses.replace(table, documents=tuple(everything))), arguments.out))
        return {"markdown": pg19_report.to_markdown(name, readings), "readings": [value for _, value in readings]}

    def _fill_timing(self) -> dict[str, Any]:
        arguments, path = self._arguments, self._arguments.out / "timing.json"
        if not arguments.collect:
            document = self._choose_documents((APART, *HEADLINE))[0]
            rows = keep_what_fits(self._base, timed_rows(arguments.rows), self.common)
            ids, lengths = self._get_ids(document), measured_lengths(arguments, self.common.window)
            measure(self._base, self._load, rows, self.common, ids, lengths, path, {"document": document})
        return _with_markdown(path, pg19_report.timing_to_markdown)

    def _fill_block(self, name: str) -> dict[str, Any]:
        arguments, path = self._arguments, self._arguments.out / f"{name}.json"
        block = pg19_first_block.BLOCKS[name]
        (document, *_) = self._choose_documents((block.document,))
        wanted = choose_rows([row.name for row in block.rows], arguments.rows)
        rows = tuple(row for row in block.rows if row.name in wanted)
        ids = self._get_ids(document)[: min(block.tokens, arguments.tokens or block.tokens)]
        settings = {
            **{"document": document, "tokens": len(ids), "context": block.context},
            **{"window": self.common.window, "stride": self.common.stride},
            "rows": [f"{row.name}, {row.describe()}" for row in rows],
        }
        if path.exists() and not arguments.collect:
            _check_same(settings, json.loads(path.read_text(encoding="utf-8"))["settings"], path)
        elif not arguments.collect:
            results = pg19_first_block.read_in_turns(rows, block.context, self.common.window, self.common.stride, ids)
            write_json(path, {"settings": settings, "results": results, **describe_machine(torch.device("cpu"))})
        return _with_markdown(path, lambda value: pg19_first_block.to_markdown(value["results"]))

    def _choose_documents(self, own: tuple[str, ...]) -> list[str]:
        return choose_documents(own, list(self._texts), self._arguments.documents)

    def _tokenize(self, name: str) -> torch.Tensor:
        text = self._texts[name]
        return tokenize(self._tokenizer, unwrap(text) if backbone.is_embedded(self._arguments.model) else text)


def load_model(model: str, dtype: str, device: str) -> transformers.PreTrainedModel:
    """Gives a base without its tokenizer."""
    return loading.load_base(model, dtype, device)[0]


def measure(
    base: transformers.PreTrainedModel,
    load: Callable[[], transformers.PreTrainedModel],
    rows: list[Row],
    common: Settings,
    ids: torch.Tensor,
    lengths: tuple[int, int],
    path: Path,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measures time and operations of rows, then memory; writes each to the file as soon as it is known.

    Args:
        lengths: how many of the tokens are timed, and over how many memory is measured.
        about: what else the file shall say.
    """
    timing_tokens, memory_tokens = (min(length, len(ids)) for length in lengths)
    value = {
        **(about or {}),
        **{"model": common.model, "dtype": common.dtype, "tokens": timing_tokens, "memory_tokens": memory_tokens},
        **{"window": common.window, "stride": common.stride},
        **describe_machine(base.device),
        "rows": pg19_timing.time_rows(base, rows, common, ids[:timing_tokens]),
    }
    write_json(path, value)
    memory = pg19_timing.measure_memory(load, rows, common, ids[:memory_tokens])
    value["rows"] = [{**row, **memory[row["row"]]} for row in value["rows"]]
    write_json(path, value)
    return value


def measured_lengths(arguments: argparse.Namespace, window: int) -> tuple[int, int]:
    """Gives over how many tokens time, and over how many memory, is measured."""
    timed = arguments.timing_tokens or arguments.timing_windows * window
    return timed, arguments.memory_tokens or timed // 2


def keep_what_fits(base: transformers.PreTrainedModel, rows: Iterable[Row], common: Settings) -> list[Row]:
    """Leaves out, and says so on stderr, rows whose window is beyond the model's positions."""
    kept, limit = [], Host(base).positions
    for row in rows:
        if limit is None or row.windows * common.window <= limit:
            kept.append(row)
        else:
            print(f"left out: {row.name}, beyond the model's {limit:,} positions", file=sys.stderr, flush=True)
    return kept


def run_shapes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times the rows on random weights of known shapes, prints the tables, and gives all figures."""
    found = {}
    for shape in arguments.shapes:
        load = partial(pg19_shapes.load, shape, arguments.dtype, arguments.device)
        base = load()
        window = arguments.window or pg19_shapes.WINDOWS[shape]
        dtype = str(base.dtype).removeprefix("torch.")
        common = Settings("none", model=shape, window=window, stride=arguments.stride or window // 2, dtype=dtype)
        lengths = measured_lengths(arguments, window)
        rows = keep_what_fits(base, timed_rows(arguments.rows), common)
        path = arguments.out / f"shapes-{shape}.json"
        value = measure(base, load, rows, common, pg19_shapes.draw(base, max(lengths)), lengths, path)
        found[shape] = {"markdown": pg19_report.timing_to_markdown(value), **value}
        print(f"## {shape}\n\n{found[shape]['markdown']}\n", flush=True)
    return found


def run_tables(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fills the tables, prints them, and gives all figures but those of single chunks."""
    run, found = Run(arguments), {}
    for name in arguments.table:
        found[name] = run.fill(name)
        print(f"## {name}\n\n{found[name]['markdown']}\n", flush=True)
    if arguments.plot:
        for path in pg19_plots.draw(found, arguments.out):
            print(path, file=sys.stderr)
    return {name: _compact(table) for name, table in found.items()}


def timed_rows(chosen: list[str] | None) -> list[Row]:
    """Gives the headline's rows, or some of them, with both `none`, which times are relative to."""
    rows = TABLES["headline"].rows
    wanted = choose_rows([row.name for row in rows], chosen) | {NONE.name, NONE_RECOMPUTE.name}
    return [row for row in rows if row.name in wanted]


def _with_markdown(path: Path, to_markdown: Callable[[Any], str]) -> dict[str, Any]:
    if not path.exists():
        return {"markdown": pg19_report.NOTHING}
    value = json.loads(path.read_text(encoding="utf-8"))
    return {"markdown": to_markdown(value), **value}


def _compact(table: dict[str, Any]) -> dict[str, Any]:
    return {**table, **pg19_report.compact(table["readings"])} if table.get("readings") else table


def _check_same(here: dict[str, Any], there: dict[str, Any], path: Path) -> None:
    field = next((field for field in here if here[field] != there.get(field)), None)
    if field is not None:
        raise ValueError(
            f"{field} must be {there.get(field)!r} as in {str(path)!r}, got {here[field]!r}: "
            "choose another --out, or delete that file"
        )


def _load_texts(arguments: argparse.Namespace) -> dict[str, str]:
    if arguments.dataset:
        return load_column(arguments.dataset, arguments.split, arguments.column, arguments.limit)
    if not arguments.books:
        raise ValueError("--books must name text files or folders of them, got none: give it, or --dataset")
    return read_documents(arguments.books, arguments.limit)


def _split(value: str) -> list[str]:
    """Splits at commas; one before a blank is part of a row's name."""
    return [name for name in re.split(r",(?! )", value) if name]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts = parser.add_argument_group("texts")
    texts.add_argument("--books", action="append", metavar="PATH", help="a text file or a folder of them; repeatable")
    texts.add_argument("--dataset", help="in place of --books: a dataset on the hub, or a folder of one")
    texts.add_argument("--split", default="test")
    texts.add_argument("--column", default="text")
    texts.add_argument("--limit", type=int, help="the first so many documents")
    work = parser.add_argument_group("what is done")
    work.add_argument("--table", default="headline", help=f"with commas: {', '.join(TABLE_NAMES)}; or all")
    work.add_argument("--shapes", type=_split, help=f"in place of tables of texts: {', '.join(pg19_shapes.SHAPES)}")
    work.add_argument("--rows", type=_split, help="read only rows whose names begin so; with commas, no blanks")
    work.add_argument("--documents", type=_split, help="read only these documents; with commas")
    work.add_argument("--tokens", type=int, help="the first so many tokens of each document at most")
    work.add_argument("--timing-tokens", type=int, help="tokens that are timed (48 windows, --quick 24)")
    work.add_argument("--memory-tokens", type=int, help="tokens read to measure memory (half of those timed)")
    work.add_argument("--seeds", type=int, help="so many seeds at most")
    work.add_argument("--quick", action="store_true", help=f"{QUICK_TOKENS:,} tokens, one document a table, one seed")
    work.add_argument("--collect", action="store_true", help="read nothing: tables of what lies in --out")
    work.add_argument("--plot", action="store_true", help="draw the plots into --out (needs matplotlib)")
    work.add_argument("--out", type=Path, default=Path("benchmarks-pg19"), help="where all of it goes")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default=backbone.NAME, help="a folder, or a name on the hub")
    model.add_argument("--dtype", default="auto")
    model.add_argument("--device", default="cpu")
    model.add_argument("--window", type=int, help="512; with --shapes 2,048")
    model.add_argument("--stride", type=int, help="256; with --shapes half the window")
    model.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    arguments.table = TABLE_NAMES if arguments.table == "all" else _split(arguments.table)
    for option, known in (("table", TABLE_NAMES), ("shapes", list(pg19_shapes.SHAPES))):
        for name in getattr(arguments, option) or ():
            if name not in known:
                parser.error(f"--{option} must be among {', '.join(known)}, got {name!r}")
    arguments.timing_windows = 48
    if arguments.quick:
        arguments.tokens, arguments.seeds = arguments.tokens or QUICK_TOKENS, arguments.seeds or 1
        arguments.timing_windows = 24
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
        found = run_shapes(arguments) if arguments.shapes else run_tables(arguments)
        name = "pg19-shapes" if arguments.shapes else "pg19"
        summary = {"benchmark": name, **describe_machine(loading.choose_device(arguments.device)), "tables": found}
        markdown = "\n\n".join(f"## {title}\n\n{table['markdown']}" for title, table in found.items())
        write_json(arguments.out / f"{name}.json", {**summary, "seconds": time.perf_counter() - began})
        (arguments.out / f"{name}.md").write_text(markdown + "\n", encoding="utf-8")
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(f"pg19: {error}")
    except KeyboardInterrupt:
        sys.exit("pg19: stopped; what was read whole is kept, and the same command goes on")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
