"""The tables of the paper (arXiv:2602.05085) on any host, by one command.

    python benchmarks/paper.py MODEL --data DATA --table all --quick
    python benchmarks/paper.py MODEL --data DATA --table pg19,mmlu

The folder DATA has the data sets; `benchmarks/README.md` says which files. Each row of a table is a
result of its own, a JSON file in OUT/HOST/SCALE. The same command goes on where it was stopped, and
the processes of `accelerate launch` share the rows. OUT/HOST/SCALE.md has the tables of all results
so far, with the paper's figures beside them.

`all` leaves out three tables, which are run by their names: `baselines`, `gap` and `time`. The scale
is "quick", an hour to an hour and a half of two cores; "cpu", without a GPU; or "gpu". `--preset
paper` reads with the paper's output scale, a constant learning rate and no anchor.
"""

import argparse
from pathlib import Path

import torch
from paper_tables import baselines, forgetting, gap, locomo, mmlu, pg19, sweep, timing
from paper_tables.ablations import Init, Width
from paper_tables.bench import Bench
from paper_tables.command import add_run_options, running, write_page
from paper_tables.scales import CPU, GPU, QUICK, SCALES, Scale

from locas_peft.processes import join_processes
from locas_settings import PRESETS

TABLES = {
    "sweep": sweep,
    "pg19": pg19,
    "init": Init(),
    "width": Width(),
    "mmlu": mmlu,
    "forgetting": forgetting,
    "locomo": locomo,
    "baselines": baselines,
    "gap": gap,
    "time": timing,
}

NOT_OF_THE_PAPER = ("baselines", "gap", "time")
"""The tables that `all` leaves out, and whose rows have settings of their own. The paper has no table
of other methods and no such experiments, and times are measured while nothing else runs."""


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
    """Make the results of tables, and after each of them write the page.

    A table that cannot be made on this host is left out; its error is raised after the others.
    """
    errors: list[Exception] = []
    for name in names:
        try:
            TABLES[name].fill(bench)
        except (OSError, ValueError, ModuleNotFoundError) as error:
            # Other processes wait for this one's share.
            if name == names[-1] or join_processes().num_processes > 1:
                raise
            print(f"{name}: {error}; the other tables go on", flush=True)
            errors.append(error)
        write_tables(bench)
    if errors:
        raise errors[0]


def write_tables(bench: Bench) -> None:
    """Write the Markdown page of all results so far."""
    texts = {name: table.tabulate(bench) for name, table in TABLES.items()}
    title = f"{bench.host}, scale {bench.scale.name}"
    write_page(bench.folder.with_suffix(".md"), title, texts)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, a name on the hub, a GGUF file, or smollm2")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of the data")
    parser.add_argument(
        "--table", default="all", help=f"with commas: {', '.join(TABLES)}; or all of the paper's"
    )
    parser.add_argument("--quick", action="store_true", help="the scale quick")
    parser.add_argument("--scale", choices=SCALES, help="in place of the device's own")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/paper"))
    parser.add_argument("--preset", default="tuned", choices=PRESETS, help="of readings")
    parser.add_argument(
        "--lora-rate", type=float, help="TempLoRA's best rate; by default its sweep is made"
    )
    add_run_options(parser)
    arguments = parser.parse_args(argv)
    arguments.tables = arguments.table.split(",")
    if arguments.table == "all":
        arguments.tables = [name for name in TABLES if name not in NOT_OF_THE_PAPER]
    for name in arguments.tables:
        if name not in TABLES:
            parser.error(f"--table must be among {', '.join(TABLES)}, got {name!r}")
        if arguments.preset != "tuned" and name in NOT_OF_THE_PAPER:
            parser.error(f"--preset is not for the table {name!r}: leave one of them out")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    with running("paper", arguments):
        bench = Bench(
            arguments.model,
            arguments.data,
            arguments.out,
            choose_scale(arguments),
            arguments.device,
            arguments.dtype,
            arguments.preset,
        )
        if arguments.lora_rate is not None:
            bench.lora_rate = arguments.lora_rate
        if arguments.collect:
            write_tables(bench)
        else:
            fill_tables(bench, arguments.tables)


if __name__ == "__main__":
    main()
