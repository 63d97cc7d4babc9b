"""`benchmarks/long_study.py`: one document, one memory of it and the sum of its parts', on a toy model."""

import json
import sys

import pytest

from locas_peft import backbone, stages
from locas_peft.selfstudy import Exchange


@pytest.fixture
def script(load_benchmark):
    module = load_benchmark("long_study")
    yield module
    for name in list(sys.modules):
        if name.partition(".")[0] in ("knowledge", "measuring", "knowledge_tables", "paper_tables"):
            del sys.modules[name]


def write_passages(folder):
    rows = []
    for number in range(206):
        questions = [{"question": f"Who built house {number}?", "answer": "man"}] * 2
        context = f"The house number {number} was built by the old man. He lived in it."
        rows.append({"title": "House", "context": context, "questions": questions})
    file = folder / "squad.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_rows_are_made_once(script, monkeypatch, tmp_path, capsys):
    studied = []

    def quick(base, tokenizer, ids, settings, place):
        studied.append(tokenizer.decode(ids))
        given = [Exchange("Who built the house?", "The old man built the house.")]
        return stages.study(base, tokenizer, ids, settings, place, exchanges=given)

    monkeypatch.setattr(script, "study", quick)
    out = tmp_path / "out"
    arguments = [backbone.NAME, "--data", str(write_passages(tmp_path)), "--out", str(out)]
    arguments += ["--parts", "2", "--tokens", "2000"]
    arguments += ["--study", "method=locas-glu,r=4,passes=1,anchor=0"]
    script.main(arguments)
    whole, *parts = studied
    assert len(parts) == 2 and "\n\n".join(parts) == whole
    assert "number 200 " in whole and "number 199 " not in whole
    rows = json.loads((out / "long_study.json").read_text())["rows"]
    assert list(rows) == ["the base", "one memory", "sum of 2 memories"]
    assert all(row["asked"] == 6 for row in rows.values())
    assert rows["the base"]["bytes"] == 0 < rows["one memory"]["bytes"]
    printed = capsys.readouterr().out.splitlines()[-5:]
    script.main(arguments)
    assert len(studied) == 3 and capsys.readouterr().out.splitlines() == printed
