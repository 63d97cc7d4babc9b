"""Run PEFT's method comparison with LOCAS: registers the method, then runs the `run.py` beside this file.

python run_locas.py -v experiments/locas/llama-3.2-3B-rank64     # in method_comparison/MetaMathQA of PEFT's repository
"""

import runpy
import sys
from pathlib import Path

import locas_peft  # noqa: F401  # registers LOCAS with PEFT

FOLDER = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))  # run.py imports the modules beside it
    sys.argv[0] = str(FOLDER / "run.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
