"""The `locas` command: read a text into a memory, compare methods, generate, merge, inspect, evaluate.

Bad input ends with one line on stderr and exit code 2; an interruption with 130; what nobody foresaw with its
traceback and 1. What a command has to say goes to stdout, progress and remarks to stderr.
"""

from .evaluate import eval_app, forgetting, locomo, perplexity, report
from .memories import generate, inspect, merge
from .reading import compare, demo, memorize
from .shell import app, main

for _function in (demo, memorize, compare, generate, merge, inspect):
    app.command()(_function)
for _function in (perplexity, locomo, forgetting, report):
    eval_app.command()(_function)
app.add_typer(eval_app, name="eval")

__all__ = ["app", "main"]
