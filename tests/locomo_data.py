"""A LoCoMo file made by hand: two short conversations, each category once or more."""

import json
from pathlib import Path


def make_sample(sample_id: str = "talk-1", pet: str = "grey parrot", city: str = "Lisbon") -> dict:
    def say(dia_id: str, speaker: str, text: str, **more: str) -> dict:
        return {"speaker": speaker, "dia_id": dia_id, "text": text, **more}

    def ask(category: int, question: str, answer: object, evidence: str) -> dict:
        key = "adversarial_answer" if category == 5 else "answer"
        return {"question": question, key: answer, "evidence": [evidence], "category": category}

    conversation = {
        "speaker_a": "Ida",
        "speaker_b": "Ben",
        "session_1_date_time": "9:00 am on 1 March, 2023",
        "session_1": [
            say("D1:1", "Ida", f"I bought a {pet}  yesterday, and a cage."),
            say("D1:2", "Ben", "Lovely! I baked bread.", blip_caption="a loaf"),
        ],
        "session_2_date_time": "8:30 pm on 4 April, 2023",
        "session_2": [
            say("D2:1", "Ben", f"We moved to {city} last week."),
            say("D2:2", "Ida", "Paint the kitchen blue, it calms everybody."),
        ],
    }
    questions = [
        ask(1, "What did Ida buy?", f"{pet}, cage", "D1:1"),
        ask(2, "When did they move?", "March 2023", "D2:1"),
        ask(3, "What calms?", "Blue; a colour", "D2:2"),
        ask(4, "Where to did Ben move?", city.upper(), "D2:1; D1:2"),
        ask(4, "How many loaves?", 1, "D1:2"),
        ask(5, "What did Ben buy?", pet, "D1:1"),
    ]
    return {"sample_id": sample_id, "conversation": conversation, "qa": questions}


def make_samples() -> list[dict]:
    return [make_sample(), make_sample("talk-2", "brown terrier", "Oslo")]


def write_samples(directory: Path, samples: object) -> Path:
    path = directory / "talks.json"
    path.write_text(json.dumps(samples), encoding="utf-8")
    return path
