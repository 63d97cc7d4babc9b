"""A study of a German text, of a table and of code: what SmolLM2 answers about them afterwards."""

import pytest

from locas_peft import text
from locas_peft.asking import Answerer, Question, count_right
from locas_peft.bases import load_base
from locas_peft.bases.gguf import is_installed
from locas_peft.memories import load_memory
from locas_peft.stages import Place, complete, study
from locas_settings import StudySettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("smollm2"), reason="SmolLM2 is not installed"),
]
GERMAN = (
    "Die Fähre Linde verkehrt zwischen Norderau und Kielholm. Ihr Kapitän heißt Jannis Petersen. "
    "Die Überfahrt dauert neunzig Minuten. Eine Fahrkarte kostet vier Euro. Hunde müssen an Bord "
    "einen Maulkorb tragen. Im Winter liegt die Fähre im Hafen von Kielholm."
)
TABLE = """The stations of the Marl Valley railway:

| Station | Opened | Keeper | Platforms |
|---|---|---|---|
| Thornby | 1873 | Ada Quill | 4 |
| Wexcombe | 1881 | Tom Larch | 2 |
| Saltney | 1890 | Iris Vane | 3 |
| Dunmere | 1902 | Hugh Peel | 1 |
| Orrin | 1911 | Nell Frost | 2 |
"""
CODE = '''def open_valve(valve):
    """Open a valve slowly."""
    valve.turn(degrees=37)
    return valve.pressure

def close_valve(valve):
    """Close a valve at once."""
    valve.turn(degrees=-410)
    log("closed by Brandt")

def read_gauge(gauge):
    """Read a gauge, in hectopascals."""
    return gauge.raw * 0.8125

def sound_alarm(siren):
    """Sound the alarm three times."""
    siren.play("lighthouse.wav", times=3)
'''
# A text, its questions, and the fewest right answers. There were 2, 4 and 3 on one thread, and 2 of
# the table's on two threads: a study's figures move with rounding.
TEXTS = {
    "German": (
        GERMAN,
        {
            "Wie heißt der Kapitän der Fähre?": "Petersen",
            "Was kostet eine Fahrkarte?": "vier Euro",
            "Wo liegt die Fähre im Winter?": "Hafen von Kielholm",
            "Was müssen Hunde an Bord tragen?": "Maulkorb",
        },
        1,
    ),
    "a table": (
        TABLE,
        {
            "Who is the keeper of the station Saltney?": "Iris Vane",
            "When was Wexcombe opened?": "1881",
            "Who is the keeper of Orrin?": "Nell Frost",
            "How many platforms does Thornby have?": "4",
        },
        1,
    ),
    "code": (
        CODE,
        {
            "How many degrees does open_valve turn the valve?": "37",
            "Which file does sound_alarm play?": "lighthouse.wav",
            "What does read_gauge return?": "0.8125",
            "What does close_valve log?": "Brandt",
        },
        2,
    ),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_studied_text_answers_questions_that_the_base_does_not(kind, tmp_path):
    content, asked, least = TEXTS[kind]
    base, tokenizer = load_base("smollm2", dtype="bfloat16", device="cpu")
    questions = [Question(*pair) for pair in asked.items()]
    before = Answerer(base, tokenizer).answer(questions)
    out = tmp_path / "memory"
    settings = complete(StudySettings(), base)
    study(base, tokenizer, text.tokenize(tokenizer, content), settings, Place(out=out))
    after = Answerer(load_memory(base, out), tokenizer).answer(questions)
    assert count_right(before) == 0
    assert count_right(after) >= least, [answer.text for answer in after]
