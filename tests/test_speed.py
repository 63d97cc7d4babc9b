"""The table of speeds (`benchmarks/speed.py`): each row of each task, as ratios to the base and to the roofline."""

import json

import pytest

TINY = "--shapes tiny --device cpu --quick --window 32 --stride 16 --prompt-tokens 64 --rounds 2"


@pytest.fixture
def speed(load_benchmark):
    return load_benchmark("speed")


def test_each_task_has_each_row_and_the_operations_are_counted(
    speed, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(speed, "ANSWER_TOKENS", 4)
    speed.main([*TINY.split(), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    record = json.loads(printed.splitlines()[-1])
    assert json.loads((tmp_path / "tiny-cpu-quick.json").read_text()) == record
    tables = record["tables"]
    assert list(tables) == ["reading", "study", "prompt", "answering"]
    for name, rows in tables.items():
        assert f"\n| {name} | parameters | tokens/s |" in printed
        names = [row.name for row in speed.ROWS]
        if name in ("prompt", "answering"):
            names.append(speed.MERGED)
        assert [row["row"] for row in rows] == names
        none, lora_16, lora_64, locas_16, locas_64 = [row["operations"] for row in rows[:5]]
        assert none < locas_16 < lora_16 < lora_64
        assert locas_16 < locas_64 < lora_64
        for row in rows:
            assert row["tokens_per_second"] > 0
            assert row["to_roofline"] > 0
    # A merged memory has the operations of the active one.
    assert tables["prompt"][-1]["operations"] == tables["prompt"][4]["operations"]
    # Without an adapter nothing is learned.
    assert tables["study"][3]["operations"] > 1.5 * tables["study"][0]["operations"]


def test_the_bytes_of_a_step_are_those_of_its_passes(speed):
    base = speed.load_shape("tiny", device="cpu")
    host = speed.Host(base, {}, lambda: base)
    weights = 4 * sum(weight.numel() for weight in base.parameters())
    assert speed.count_bytes(host, {"parameters": 0}, 2, True) == weights
    assert speed.count_bytes(host, {"parameters": 10}, 2, True) == 2 * (weights + 40) + 7 * 40
    assert speed.count_bytes(host, {"parameters": 10}, 32, False) == 32 * (weights + 40)


def test_one_round_is_refused(speed, capsys):
    with pytest.raises(SystemExit):
        speed.main(["--rounds", "1"])
    assert "--rounds must be at least 2, got 1: quartiles need two" in capsys.readouterr().err
