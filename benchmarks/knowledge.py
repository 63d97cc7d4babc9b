"""What a studied memory knows of texts that no one here wrote, beside context, LoRA and retrieval.

    python benchmarks/knowledge.py MODEL --data all --quick
    python benchmarks/knowledge.py MODEL --data squad,fictional --folder DATA
    python benchmarks/knowledge.py MODEL --data squad --choose --study passes=3 --rows none,study

The folder DATA has the data sets; `benchmarks/README.md` says which files. Each row of a table and
each text has a result of its own, a JSON file in OUT/HOST/SCALE, which holds no text of the data;
the answers lie beside it. The same command goes on where it was stopped. OUT/HOST/SCALE.md has the
tables of all results so far; other settings of a study have a page of their own.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from knowledge_tables import fictional, pages, quality, squad, talks
from knowledge_tables.bench import KnowledgeBench, Options
from knowledge_tables.scales import FULL, QUICK, Scale
from paper_tables.command import add_run_options, running, write_page

TABLES = {
    "squad": squad,
    "fictional": fictional,
    "quality": quality,
    "pages": pages,
    "locomo": talks,
}


def fill_tables(bench: KnowledgeBench, names: Sequence[str]) -> None:
    """Make the results of tables, and after each of them write the page."""
    for name in names:
        TABLES[name].fill(bench)
        write_tables(bench, names)


def write_tables(bench: KnowledgeBench, names: Sequence[str]) -> None:
    """Write the Markdown page of all results so far."""
    texts = {}
    for name, table in TABLES.items():
        try:
            texts[name] = table.tabulate(bench)
        except FileNotFoundError:
            # The data of a table that is not asked for need not be there.
            if name in names:
                raise
    draw = f", draw {bench.options.draw}" if bench.options.draw else ""
    title = f"{bench.host}, scale {bench.scale.name}{bench.options.describe()}{draw}"
    write_page(bench.page, title, texts)


def parse_settings(text: str) -> dict[str, Any]:
    """Parse settings such as "passes=3,learning_rate=1e-3"."""
    settings: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, is_pair, value = part.partition("=")
        if not is_pair:
            raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {part!r}: write passes=3")
        settings[name] = _parse_value(value)
    return settings


def _parse_value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def choose_scale(arguments: argparse.Namespace) -> Scale:
    """Return the scale, with the numbers that are given in place of its own."""
    scale = QUICK if arguments.quick else FULL
    given = {"passages": arguments.passages, "joined": arguments.joined, "seeds": arguments.seeds}
    values = {name: value for name, value in given.items() if value is not None}
    return replace(scale, **values)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a folder, a name on the hub, a GGUF file, or smollm2")
    add("--data", default="all", help=f"tables, with commas: {', '.join(TABLES)}; or all")
    add("--folder", type=Path, default=Path("data"), help="the folder of the data sets")
    add("--out", type=Path, default=Path("benchmarks/results/knowledge"))
    add("--quick", action="store_true", help="a try: one passage of each kind")
    add("--choose", action="store_true", help="the passages that settings are chosen on")
    add("--rows", help="keys of rows, with commas; all by default")
    add("--passages", type=int, help="of SQuAD and of the fictional ones; 20 by default")
    add("--joined", type=int, help="passages of SQuAD in one memory; 50 by default, 0 for none")
    add("--seeds", type=int, help="of the studies of the pages; 1 by default")
    add("--draw", type=int, default=0, help="the seed that draws passages")
    add("--study", type=parse_settings, default={}, help="settings of a study: passes=3,r=32")
    add("--lora", type=parse_settings, default={}, help="the same for LoRA's")
    add("--lora-rate", type=float, help="the rate of LoRA's studies; the method's by default")
    add("--pages", type=Path, action="append", default=[], help="a folder of pages; repeatable")
    add("--forget", action="store_true", help="remove memories that no row needs any more")
    add_run_options(parser)
    arguments = parser.parse_args(argv)
    arguments.tables = list(TABLES) if arguments.data == "all" else arguments.data.split(",")
    for name in arguments.tables:
        if name not in TABLES:
            parser.error(f"--data must be among {', '.join(TABLES)}, got {name!r}")
    arguments.rows = _parse_rows(parser, arguments)
    if arguments.lora_rate is not None:
        arguments.lora["learning_rate"] = arguments.lora_rate
    return arguments


def _parse_rows(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> tuple[str, ...] | None:
    if arguments.rows is None:
        return None
    known = {row.key for row in fictional.list_rows(choose_scale(arguments).readings)}
    for table in (squad, quality, pages, talks):
        known.update(row.key for row in table.ROWS)
    keys = tuple(arguments.rows.split(","))
    for key in keys:
        if key not in known:
            parser.error(f"--rows must be among {', '.join(sorted(known))}, got {key!r}")
    return keys


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    options = Options(
        choose=arguments.choose,
        draw=arguments.draw,
        rows=arguments.rows,
        study=arguments.study,
        lora=arguments.lora,
        pages=tuple(arguments.pages),
        forget=arguments.forget,
    )
    with running("knowledge", arguments):
        bench = KnowledgeBench(
            arguments.model,
            arguments.folder,
            arguments.out,
            choose_scale(arguments),
            options,
            arguments.device,
            arguments.dtype,
        )
        if arguments.collect:
            write_tables(bench, ())
        else:
            fill_tables(bench, arguments.tables)


if __name__ == "__main__":
    main()
