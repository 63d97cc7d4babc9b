"""`python -m locas_peft` is the `locas` command."""

from locas_command import main

main()
