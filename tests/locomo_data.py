"""A LoCoMo file made by hand: two short conversations, each category once or more."""

from __future__ import annotations

import json
from pathlib import Path


def make_sample(sample_id: str = "talk-1", pet: str = "grey parrot", city: str = "Lisbon") -> dict:
    return {
        "sample_id": sample_id,
        "conversation": {
            "speaker_a": "Ida",
            "speaker_b": "Ben",
            "session_1_date_time": "9:00 am on 1 March, 2023",
            "session_1": [
                {
                    "speaker": "Ida",
                    "dia_id": "D1:1",
                    "text": f"I bought a {pet}  yesterday, and a cage.",
                },
                {
                    "speaker": "Ben",
                    "dia_id": "D1:2",
                    "text": "Lovely! I baked bread.",
                    "blip_caption": "a loaf",
                },
            ],
            "session_2_date_time": "8:30 pm on 4 April, 2023",
            "session_2": [
                {"speaker": "Ben", "dia_id": "D2:1", "text": f"We moved to {city} last week."},
                {
                    "speaker": "Ida",
                    "dia_id": "D2:2",
                    "text": "Paint the kitchen blue, it calms everybody.",
                },
            ],
        },
        "qa": [
            {
                "question": "What did Ida buy?",
                "answer": f"{pet}, cage",
                "evidence": ["D1:1"],
                "category": 1,
            },
            {
                "question": "When did they move?",
                "answer": "March 2023",
                "evidence": ["D2:1"],
                "category": 2,
            },
            {
                "question": "What calms?",
                "answer": "Blue; a colour",
                "evidence": ["D2:2"],
                "category": 3,
            },
            {
                "question": "Where to did Ben move?",
                "answer": city.upper(),
                "evidence": ["D2:1; D1:2"],
                "category": 4,
            },
            {"question": "How many loaves?", "answer": 1, "evidence": ["D1:2"], "category": 4},
            {
                "question": "What did Ben buy?",
                "adversarial_answer": pet,
                "evidence": ["D1:1"],
                "category": 5,
            },
        ],
    }


def make_samples() -> list[dict]:
    return [make_sample(), make_sample("talk-2", "brown terrier", "Oslo")]


def write_samples(directory: Path, samples: object) -> Path:
    path = directory / "talks.json"
    path.write_text(json.dumps(samples), encoding="utf-8")
    return path
