"""`python -m locas_peft`: the `locas` command."""

from .cli import main

main()
