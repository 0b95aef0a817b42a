"""The page of `codec_speed`."""

from meshtraind.bench.codec_report import CodecFigures, CodecReport
from meshwire.codecs.registry import FAMILIES, parse_codec
from tests.bench.codec_speed import REASONS, page


def figures(codec: str, encoded_bytes: int, seconds: float) -> CodecFigures:
    return CodecFigures(codec, 10_000_000, encoded_bytes, seconds / 2, seconds / 2, error=0.5, memory_bytes=2**20)


def test_every_codec_has_a_row_and_slow_ones_a_reason() -> None:
    fp32 = figures("fp32", 40_000_000, 0.01)
    slow, unknown = figures("dct:decay=0.999", 300_000, 0.4), figures("fp16", 20_000_000, 0.07)
    lines = page(CodecReport(3, {fp32.values: fp32}, [fp32, slow, unknown]), load=0.25).splitlines()
    (row,) = (line for line in lines if line.startswith("| `dct"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:3] + cells[5:9] == ["`dct:decay=0.999`", "0.240", "0.5000", "400.0 ms", "40.0", "", "1.0 MiB"]
    reasons = [line for line in lines if line.startswith("- ")]
    assert reasons[0] == f"- `dct:decay=0.999`, 400.0 ms: {REASONS['dct']}."
    assert reasons[1].endswith("a fault.")
    assert "None." in page(CodecReport(3, {fp32.values: fp32}, [fp32]), load=0.25)


def test_reasons_are_of_codecs_that_there_are() -> None:
    assert {parse_codec(text).name for text in REASONS} <= set(FAMILIES)
