"""`python -m locas_peft` is the `locas` command."""

from .cli import main

main()
