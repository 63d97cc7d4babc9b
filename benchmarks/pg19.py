"""Online perplexity of whole books: the paper's PG-19 tables on an embedded backbone, or on any causal LM.

    python benchmarks/pg19.py --books eval --books train/2118.txt --table headline
    python benchmarks/pg19.py --books eval --books train/2118.txt --table sweep --rows none,locas-glu@64
    python benchmarks/pg19.py --dataset emozilla/pg19-test --model Qwen/Qwen3-0.6B --window 2048 --stride 1024

Each chunk is scored before it is learned. What is read goes to --out, a file each reading: a second call goes on where
the first was stopped, several calls can share the work by --rows and --documents, and the tables are made of whatever
lies there. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pg19_report
import torch
from pg19_quality import Job, collect, list_jobs, read_jobs
from pg19_rows import APART, HEADLINE, TABLES, TRAINING, shorten

from locas_peft import backbone, loading
from locas_peft.methods import Settings
from locas_peft.studies.documents import load_column, read_documents
from locas_peft.text import tokenize, unwrap


def choose_documents(table: str, names: list[str], chosen: list[str] | None) -> list[str]:
    """Gives the documents to read for a table: those chosen, else the table's own, else all.

    Raises:
        ValueError: a chosen one is not at hand, or none of the table's books is where others of ours are.
    """
    for name in chosen or ():
        if name not in names:
            raise ValueError(f"--documents must be among {', '.join(names)}, got {name!r}: check the name")
    if chosen:
        return chosen
    own = TABLES[table].documents
    if set(names).isdisjoint((*HEADLINE, APART, TRAINING)):
        return names
    found = [name for name in own if name in names]
    if not found:
        raise ValueError(f"--books must hold one of {', '.join(own)} for --table {table}, got {', '.join(names)}")
    return found


def choose_rows(jobs: list[Job], chosen: list[str] | None) -> list[Job]:
    """Gives the jobs of rows whose names begin with a chosen word."""
    if not chosen:
        return jobs
    for start in chosen:
        if not any(job.row.name.startswith(start) for job in jobs):
            names = "; ".join(dict.fromkeys(job.row.name for job in jobs))
            raise ValueError(f"--rows must be beginnings of names among {names}; got {start!r}")
    return [job for job in jobs if job.row.name.startswith(tuple(chosen))]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Reads what is wanted and prints the tables."""
    texts = _load_texts(arguments)
    base, tokenizer = loading.load_base(arguments.model, arguments.dtype, arguments.device)
    join_lines = backbone.is_embedded(arguments.model)

    @cache
    def get_ids(name: str) -> torch.Tensor:
        return tokenize(tokenizer, unwrap(texts[name]) if join_lines else texts[name])

    common = Settings(
        method="none",
        model=backbone.name_of(arguments.model),
        window=arguments.window,
        stride=arguments.stride,
        dtype=str(base.dtype).removeprefix("torch."),
    )
    found = {}
    for name in arguments.table:
        table = TABLES[name] if arguments.tokens is None else shorten(TABLES[name], arguments.tokens)
        jobs = list_jobs(table, choose_documents(name, list(texts), arguments.documents), arguments.seeds)
        if not arguments.collect:
            read_jobs(base, choose_rows(jobs, arguments.rows), common, get_ids, arguments.out)
        readings = list(collect(jobs, arguments.out))
        print(f"## {name}\n\n{pg19_report.to_markdown(name, readings)}\n", flush=True)
        drop = ("chunks",)
        found[name] = [{key: item for key, item in value.items() if key not in drop} for _, value in readings]
    return {"benchmark": "pg19", "model": common.model, "tables": found}


def _load_texts(arguments: argparse.Namespace) -> dict[str, str]:
    if arguments.dataset:
        return load_column(arguments.dataset, arguments.split, arguments.column, arguments.limit)
    if not arguments.books:
        raise ValueError("--books must name text files or folders of them, got none: give it, or --dataset")
    return read_documents(arguments.books, arguments.limit)


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", action="append", metavar="PATH", help="a text file or a folder of them; repeatable")
    parser.add_argument("--dataset", help="in place of --books: a dataset on the hub, or a folder of one")
    parser.add_argument("--split", default="test")
    parser.add_argument("--column", default="text")
    parser.add_argument("--limit", type=int, help="the first so many documents")
    parser.add_argument("--table", default="headline", help=f"{', '.join(TABLES)}, first-block or all; with commas")
    parser.add_argument("--rows", type=_names, help="read only rows whose names begin so; with commas")
    parser.add_argument("--documents", type=_names, help="of these documents only; with commas")
    parser.add_argument("--tokens", type=int, help="the first so many tokens of each document at most")
    parser.add_argument("--seeds", type=int, help="so many seeds at most")
    parser.add_argument("--collect", action="store_true", help="read nothing: tables of what lies in --out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks-pg19"), help="where the readings go")
    parser.add_argument("--model", default=backbone.NAME, help="a folder, or a name on the hub")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    arguments.table = list(TABLES) if arguments.table == "all" else _names(arguments.table)
    for name in arguments.table:
        if name not in TABLES:
            parser.error(f"--table must be one of {', '.join(TABLES)}, all, got {name!r}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    # PEFT asks transformers for a property that transformers has renamed.
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
    torch.set_num_threads(arguments.threads)
    try:
        summary = run(arguments)
    except (OSError, ValueError) as error:
        sys.exit(f"pg19: {error}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
