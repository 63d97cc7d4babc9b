"""The options that several commands share, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Option(help="A causal LM: folder or hub name. Default: the embedded backbone.", metavar="NAME"),
]
Preset = Annotated[str, typer.Option(help="Where the defaults come from: tuned or paper.")]
Width = Annotated[int | None, typer.Option("--r", help="Memory width, LoRA rank.", min=1)]
Init = Annotated[str | None, typer.Option(help="How a memory begins: topk, bottomk, random, gaussian or activation.")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Learning rate. Default: the preset's.")]
Scaling = Annotated[
    float | None, typer.Option(help="Multiplies tau, the memory's output scale. Default: the preset's.")
]
Window = Annotated[
    int | None,
    typer.Option(help="Tokens the model sees at once. Default: 512; with --model up to 2048.", min=1),
]
Stride = Annotated[int | None, typer.Option(help="Tokens between two learning steps. Default: window / 2.", min=1)]
Context = Annotated[
    str | None,
    typer.Option(help="cache keeps the context's keys and values, recompute reads it again (default with --model)."),
]
Epochs = Annotated[int, typer.Option(help="Learning passes over each chunk.", min=1)]
MaxTokens = Annotated[int | None, typer.Option(help="Read so many tokens at most.", min=2)]
Seed = Annotated[int, typer.Option(help="Set before each method.")]
Dtype = Annotated[str, typer.Option(help="Of the base: auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
Unwrap = Annotated[
    bool | None,
    typer.Option(
        "--unwrap/--no-unwrap",
        help="Join hard-wrapped lines to paragraphs first. Default: for the embedded backbone only.",
        show_default=False,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write JSON; - for stdout.", metavar="FILE", allow_dash=True),
]
Text = Annotated[str, typer.Argument(help="A UTF-8 text file, or - for stdin.", metavar="TEXT")]
Memory = Annotated[Path, typer.Argument(help="A memory's folder.", metavar="MEMORY")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run left in --out.")]
