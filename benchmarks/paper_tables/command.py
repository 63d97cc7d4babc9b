"""What the commands that fill tables share: options of the run, and how it ends."""

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from locas_peft.files import check_output_directory
from locas_peft.processes import join_processes

__all__ = ["add_run_options", "running", "write_page"]


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where and how a run measures."""
    parser.add_argument("--collect", action="store_true", help="measure nothing: write the page")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="of torch; by default its own number")


@contextmanager
def running(name: str, arguments: argparse.Namespace) -> Iterator[None]:
    """Set up a run within the context; an error or Ctrl-C there ends the command with one line.

    Args:
        name: of the command.
        arguments: has `out`, and the options of `add_run_options`.
    """
    # PEFT asks transformers for a property that transformers has renamed.
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
    transformers.utils.logging.disable_progress_bar()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    try:
        check_output_directory("--out", arguments.out)
        yield
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{name}: stopped; finished rows are kept, and the same command goes on")


def write_page(page: Path, title: str, texts: Mapping[str, str]) -> None:
    """Write a Markdown page of tables by their names, without empty ones; in the first process."""
    if not join_processes().is_main_process:
        return
    parts = [f"# {title}"]
    for name, text in texts.items():
        if text:
            parts.append(f"## {name}\n\n{text}")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"tables: {page}", flush=True)
