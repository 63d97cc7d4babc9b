"""BLiMP (`benchmarks/blimp.py`): pairs out of the zip file, their scores, and the paired drop."""

from __future__ import annotations

import json
import zipfile

import pytest

from locas_peft import backbone
from locas_peft.asking.scoring import score_targets

PAIRS = {
    "agreement": [
        ("The dogs bark.", "The dogs barks."),
        ("She sings.", "She sing."),
        ("We go.", "We goes."),
    ],
    "islands": [("What did you see?", "What did you see it?")],
}


@pytest.fixture(scope="module")
def blimp(load_benchmark):
    return load_benchmark("blimp")


@pytest.fixture
def archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "blimp.zip", "w") as file:
        for name, pairs in PAIRS.items():
            rows = [
                {"UID": name, "sentence_good": good, "sentence_bad": bad} for good, bad in pairs
            ]
            file.writestr(f"data/{name}.jsonl", "\n".join(map(json.dumps, rows)))
            file.writestr(f"__MACOSX/data/._{name}.jsonl", b"\x00\x05")
    return tmp_path / "blimp.zip"


def test_the_first_pairs_of_each_paradigm_are_loaded(blimp, archive):
    found = [(pair["UID"], pair["sentence_good"]) for pair in blimp.load_pairs(archive, 2)]
    assert found == [
        ("agreement", "The dogs bark."),
        ("agreement", "She sings."),
        ("islands", "What did you see?"),
    ]


def test_a_pair_is_right_where_its_good_sentence_has_the_lower_nll(blimp, archive):
    model, tokenizer = backbone.load()
    right = blimp.find_right(model, tokenizer, blimp.load_pairs(archive, 9))
    sentences = [sentence for pairs in PAIRS.values() for pair in pairs for sentence in pair]
    alone = [
        score_targets(model, [blimp.encode_pair(tokenizer, "", each)])[0] for each in sentences
    ]
    nats = [each.nll_nats for each in alone]
    assert right == [good < bad for good, bad in zip(nats[::2], nats[1::2], strict=True)]
    assert alone[3].tokens == len(tokenizer("She sing.")["input_ids"]), (
        "the first token is foretold too"
    )


def test_the_drop_is_paired(blimp):
    pairs = [{"UID": name} for name, rows in PAIRS.items() for _ in rows]
    found = blimp.summarize(pairs, [True, False, False, True], [True, True, False, True])
    assert found["accuracy"]["mean"] == 0.5 and found["drop"]["mean"] == 0.25
    assert found["paradigms"] == {"agreement": 1 / 3, "islands": 1.0}
