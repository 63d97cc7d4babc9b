"""`locas read --manifest` and `locas study --manifest`: a table, learned into a library."""

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from locas_peft import backbone
from locas_peft.files import check_output_directory
from locas_peft.library import Library
from locas_peft.library.table import FAILURES, Document, load_table, teach_on_ray, teach_table
from locas_settings import StageSettings

from .console import (
    check_shared_device,
    deferring_signals,
    open_consoles,
    printable,
    show_progress,
    write_result,
)
from .options import BaseOptions, PlaceOptions, TableOptions
from .running import find_recorded_name, load

MOST_SHOWN = 20


def teach_manifest(
    table: TableOptions,
    place: PlaceOptions,
    unwrap: bool | None,
    json_file: Path | None,
    settings: StageSettings,
    base: BaseOptions,
) -> int:
    """Teach a table, print what failed, and return the exit code: 3 where something did."""
    stdout, stderr = open_consoles(json_file)
    check_shared_device(base.device)
    # `locas read` and `locas study` refuse a table without them.
    assert table.manifest is not None
    assert place.library is not None
    check_output_directory("--library", place.library)
    documents = load_table(table.manifest, settings)
    library = Library(place.library)
    model = base.model or library.name_base() or backbone.NAME
    base = replace(base, model=model)
    name = find_recorded_name(model)
    library.check_base(name)
    documents = [_record_model(document, name) for document in documents]
    options: dict[str, Any] = {
        "overwrite": place.overwrite,
        "checkpoint_seconds": place.checkpoint_seconds,
        "unwrapped": backbone.is_embedded(name) if unwrap is None else unwrap,
    }
    if not place.keep_text:
        options["sample"] = None
        options["kept_text"] = None
    if table.ray:
        failures = _teach_on_ray(library, model, base, documents, table, stderr, options)
    else:
        failures = _teach_here(library, base, documents, stderr, options)
    _show_failures(failures, place.library, stderr)
    done = f"{len(documents) - len(failures)} of {len(documents)} are in {place.library}"
    stdout.print(f"{done}. Next: locas ask QUESTION --library {place.library}")
    write_result(json_file, {"documents": len(documents), "failures": failures})
    return 3 if failures else 0


def _record_model(document: Document, name: str) -> Document:
    """Return a document whose settings name the base, for the memory's record."""
    return replace(document, settings=replace(document.settings, model=name))


def _teach_on_ray(
    library: Library,
    model: str,
    base: BaseOptions,
    documents: list[Document],
    table: TableOptions,
    stderr: Console,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    # The actors have other current folders.
    if os.path.exists(model):
        model = os.path.abspath(model)
    loading = {
        "name": model,
        "dtype": base.dtype,
        "device": base.device,
        "quantize": base.quantize,
    }
    address = table.ray if isinstance(table.ray, str) else None
    # Ray prints to stdout, which is for results.
    with show_progress(stderr) as progress, redirect_stdout(sys.stderr):
        return teach_on_ray(
            library,
            loading,
            documents,
            address=address,
            actors_per_node=table.actors,
            progress=progress,
            **options,
        )


def _teach_here(
    library: Library,
    base: BaseOptions,
    documents: list[Document],
    stderr: Console,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    with show_progress(stderr) as progress, deferring_signals(stderr) as check:

        def after_step(step: Any) -> None:
            check()

        loaded = load(base)
        return teach_table(
            library,
            loaded.model,
            loaded.tokenizer,
            documents,
            progress=progress,
            on_step=after_step,
            **options,
        )


def _show_failures(failures: list[dict[str, Any]], folder: Path, stderr: Console) -> None:
    """Print the first failures, and where all of them are listed."""
    for failure in failures[:MOST_SHOWN]:
        where = f"line {failure['line']}"
        if failure["name"]:
            where += f", {printable(failure['name'])}"
        stderr.print(f"{where}: {failure['error']}")
    if failures:
        listed = f"{len(failures)} failed: {folder / FAILURES} lists them"
        stderr.print(f"{listed}. The same command tries them again")
