"""`locas app`: the page on which a text is read and asked about."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from .console import open_consoles
from .options import BaseOptions, NamedPath


def app(
    *,
    shelf: NamedPath | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 7860,
    no_browser: bool = False,
    model: str | None = None,
    device: str = "auto",
) -> None:
    """Open a web page: read a text, ask with and without the memory, keep memories on a shelf.

    Args:
        shelf: a folder of memories that all visitors share and that stays; where not given, each browser has one of
            its own until the command ends.
        host: the address to listen on; others than this machine's own can be reached by whoever is in its network,
            and the page has no password.
        port: of the address; 0 for any free one.
        no_browser: only print the page's address.
        model: as for the other commands; where not given, smollm2 if it is installed, else the embedded one.
        device: cpu, cuda, cuda:1, ... or auto.
    """
    from locas_peft import demo
    from locas_peft.app import check_installed
    from locas_peft.files import check_output_directory

    from .running import load

    if shelf is not None:
        check_output_directory("--shelf", shelf)
    stdout, stderr = open_consoles()
    check_installed()
    from locas_peft.app.page import serve

    name = model or demo.choose_model()
    stderr.print(f"loading {name}")
    base = load(BaseOptions(model=name, device=device))
    serve(
        base.name, base.model, base.tokenizer, shelf=shelf, host=host, port=port, open_browser=not no_browser,
        announce=lambda address: stdout.print(f"The page is at {address} (Ctrl-C ends it)"),
    )  # fmt: skip
