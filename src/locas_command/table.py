"""`locas memorize --manifest`: a table of documents, taught into a library by any number of processes."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import torch

from locas_peft import backbone
from locas_peft.files import check_output_directory
from locas_peft.library import Library
from locas_peft.library.table import FAILURES, load_table, teach_on_ray, teach_table
from locas_peft.reading import ReadingSettings

from .console import (
    deferring_signals,
    find_process,
    open_consoles,
    printable,
    show_progress,
    write_result,
)
from .options import BaseOptions, ReadingOptions
from .running import load


def teach_manifest(
    manifest: str,
    folder: Path,
    workers: int,
    ray: bool | str,
    unwrap: bool | None,
    json_file: Path | None,
    settings: ReadingOptions,
    base: BaseOptions,
    **options: Any,
) -> int:
    """Teach a table's documents, print what failed, and return the exit code: 3 where something did."""
    stdout, stderr = open_consoles(json_file)
    check_output_directory("--library", folder)
    documents = load_table(manifest, ReadingSettings(**vars(settings)))
    library, (index, _) = Library(folder), find_process()
    base = replace(base, model=base.model or library.name_base() or backbone.NAME)
    name = backbone.name_of(base.model)
    library.check_base(name)
    documents = [replace(each, settings=replace(each.settings, model=name)) for each in documents]
    options["unwrapped"] = backbone.is_embedded(name) if unwrap is None else unwrap
    if ray:
        model = (
            os.path.abspath(base.model) if os.path.exists(base.model) else base.model
        )  # actors have other folders
        given = {
            "name": model,
            "dtype": base.dtype,
            "device": base.device,
            "quantize": base.quantize,
        }
        options |= {"address": None if ray is True else ray, "workers": workers}
        with show_progress(stderr) as progress, redirect_stdout(sys.stderr):  # Ray prints there
            failures = teach_on_ray(library, given, documents, progress=progress, **options)
    else:
        if workers > 1 and base.device == "auto" and torch.cuda.device_count() > 1:
            base = replace(base, device=f"cuda:{index % torch.cuda.device_count()}")
        with (
            _started(workers, index),
            show_progress(stderr) as progress,
            deferring_signals(stderr) as check,
        ):
            loaded = load(base)
            options |= {
                "progress": progress,
                "on_chunk": lambda step: check(),
                "on_study": lambda step: check(),
            }
            failures = teach_table(library, loaded.model, loaded.tokenizer, documents, **options)
    for each in failures[:20]:
        where = f"line {each['line']}" + (f", {printable(each['name'])}" if each["name"] else "")
        stderr.print(f"{where}: {each['error']}")
    if failures:
        stderr.print(
            f"{len(failures)} failed: {folder / FAILURES} lists them. The same command tries them again"
        )
    done = f"{len(documents) - len(failures)} of {len(documents)} are in {folder}"
    stdout.print(f"{done}. Next: locas ask QUESTION --library {folder}")
    write_result(json_file, {"documents": len(documents), "failures": failures})
    return 3 if failures else 0


@contextmanager
def _started(count: int, index: int) -> Iterator[None]:
    """Share the cores out among `count` processes of this command; the first one starts the others, and ends them."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    threads, command = max(cores // count, 1), [sys.executable, "-m", "locas_peft", *sys.argv[1:]]
    if count > 1:
        torch.set_num_threads(threads)
    with ExitStack() as stack:  # which waits for the processes
        for number in range(1, 1 if index else count):
            own = {
                "OMP_NUM_THREADS": str(threads),
                "LOCAS_WORKERS": str(count),
                "LOCAS_WORKER": str(number),
            }
            process = stack.enter_context(Popen(command, env={**os.environ, **own}, stdout=DEVNULL))
            stack.push(lambda kind, *_, process=process: kind and process.terminate())
        yield
