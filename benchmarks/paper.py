"""The tables of the paper (arXiv:2602.05085) on any host, by one command.

    python benchmarks/paper.py MODEL --data DATA --table all --quick
    python benchmarks/paper.py MODEL --data DATA --table pg19,mmlu

The folder DATA has the data sets; `benchmarks/README.md` says which files. Each row of a table is a
result of its own, a JSON file in OUT/HOST/SCALE. The same command goes on where it was stopped, and
the processes of `accelerate launch` share the rows. OUT/HOST/SCALE.md has the tables of all results
so far, with the paper's figures beside them.

The scale is "quick", an hour of two cores; "cpu", without a GPU; or "gpu".
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
import transformers
from paper_tables import baselines, gap, locomo, mmlu, pg19, sweep, timing
from paper_tables.ablations import Init, Width
from paper_tables.bench import Bench
from paper_tables.scales import CPU, GPU, QUICK, SCALES, Scale

from locas_peft.files import check_output_directory
from locas_peft.processes import join_processes

TABLES = {
    "sweep": sweep,
    "pg19": pg19,
    "init": Init(),
    "width": Width(),
    "mmlu": mmlu,
    "locomo": locomo,
    "baselines": baselines,
    "gap": gap,
    "time": timing,
}


def choose_scale(arguments: argparse.Namespace) -> Scale:
    """Return the scale that is asked for, or the one of the device."""
    if arguments.scale is not None:
        return SCALES[arguments.scale]
    if arguments.quick:
        return QUICK
    has_gpu = arguments.device == "cuda" or (
        arguments.device == "auto" and torch.cuda.is_available()
    )
    return GPU if has_gpu else CPU


def fill_tables(bench: Bench, names: list[str]) -> None:
    """Make the results of tables, and after each of them write the page."""
    for name in names:
        TABLES[name].fill(bench)
        write_page(bench)


def write_page(bench: Bench) -> None:
    """Write the Markdown page of all results so far, in the first process."""
    if not join_processes().is_main_process:
        return
    parts = [f"# {bench.host}, scale {bench.scale.name}"]
    for name, table in TABLES.items():
        text = table.tabulate(bench)
        if text:
            parts.append(f"## {name}\n\n{text}")
    page = bench.folder.with_suffix(".md")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"tables: {page}", flush=True)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, a name on the hub, a GGUF file, or smollm2")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of the data")
    parser.add_argument(
        "--table", default="all", help=f"with commas: {', '.join(TABLES)}; or all but gap"
    )
    parser.add_argument("--quick", action="store_true", help="the scale quick")
    parser.add_argument("--scale", choices=SCALES, help="in place of the device's own")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/paper"))
    parser.add_argument("--collect", action="store_true", help="measure nothing: write the page")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="of torch; by default its own number")
    arguments = parser.parse_args(argv)
    arguments.tables = arguments.table.split(",")
    if arguments.table == "all":
        # The experiments are no table of the paper.
        arguments.tables = [name for name in TABLES if name != "gap"]
    for name in arguments.tables:
        if name not in TABLES:
            parser.error(f"--table must be among {', '.join(TABLES)}, got {name!r}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    # PEFT asks transformers for a property that transformers has renamed.
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
    transformers.utils.logging.disable_progress_bar()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    try:
        check_output_directory("--out", arguments.out)
        bench = Bench(
            arguments.model,
            arguments.data,
            arguments.out,
            choose_scale(arguments),
            arguments.device,
            arguments.dtype,
        )
        if arguments.collect:
            write_page(bench)
        else:
            fill_tables(bench, arguments.tables)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(f"paper: {error}")
    except KeyboardInterrupt:
        sys.exit("paper: stopped; finished rows are kept, and the same command goes on")


if __name__ == "__main__":
    main()
