"""What commands print of readings: side by side, as a table."""

from locas_command.running import tabulate_readings
from locas_peft.stages import ReadRecord, ReadSettings, complete


def make_reading(method: str, perplexity: float, seconds: float, tokens: int = 2500) -> ReadRecord:
    return ReadRecord(
        settings=complete(ReadSettings(method=method)),
        text_sha256="0",
        scored_tokens=tokens - 1,
        nll_nats=1.0,
        perplexity=perplexity,
        perplexity_at={"1000": perplexity + 2, "2000": perplexity + 1},
        perplexity_between={},
        perplexities=[perplexity],
        curve=[(stop, perplexity + 3 - 3 * stop / tokens) for stop in range(250, tokens + 1, 250)],
        extra_parameters=0 if method == "none" else 294_912,
        seconds=seconds,
        peak_bytes=1,
    )


def test_the_table_compares_with_none():
    sheet = tabulate_readings(
        [make_reading("none", 40.0, 2.0), make_reading("locas-glu", 30.0, 5.0)]
    )
    headers = "method, r, parameters, ppl at 1K, ppl at 2K, perplexity, time, tokens/s"
    assert sheet.headers == headers.split(", ")
    assert sheet.rows == [
        ["none", "-", "0", "42.00", "41.00", "40.00", "1.00x", "1,250"],
        ["locas-glu", "64", "294,912", "32.00", "31.00", "30.00", "2.50x", "500"],
    ]
    assert sheet.best == (1, 5)


def test_without_none_times_are_in_seconds_and_a_mark_at_the_end_is_not_repeated():
    sheet = tabulate_readings([make_reading("lora", 30.0, 5.0, tokens=2000)])
    assert sheet.headers[3:5] == ["ppl at 1K", "perplexity"]
    assert len(sheet.rows[0]) == len(sheet.headers)
    assert sheet.rows[0][-2:] == ["5.0 s", "400"]
