"""The text form of a compression, and what is refused before a run starts."""

import subprocess
import sys

import pytest

from paceline.comm.compression import CompressionSpec, parse_compression, refuse_useless
from paceline.exceptions import UsageError


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("none", "none"),
        ("fp16", "fp16"),
        (" BF16 ", "bf16"),
        ("terngrad", "terngrad"),
        ("signsgd", "signsgd"),
        ("qsgd", "qsgd:4"),
        ("qsgd:2", "qsgd:2"),
        ("topk", "topk:0.01"),
        ("topk:1", "topk:1"),
        ("topk:.5", "topk:0.5"),
        ("dgc", "dgc:0.001"),
        ("sbc:1e-3", "sbc:0.001"),
        ("sbc:0.00001", "sbc:1e-05"),
        ("powersgd", "powersgd:1"),
        ("powersgd:4", "powersgd:4"),
    ],
)
def test_text(text: str, canonical: str) -> None:
    spec = parse_compression(text)
    assert str(spec) == canonical
    assert parse_compression(canonical) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no such compression"),
        ("topc:0.1", "did you mean topk?"),
        ("tern", "did you mean terngrad?"),
        ("zip", "no such compression. Valid"),
        ("fp16:2", "fp16 takes no number"),
        ("qsgd:1", "2 to 8 bits"),
        ("qsgd:9", "2 to 8 bits"),
        ("qsgd:0.5", "not a whole number"),
        ("qsgd:", "missing after the colon"),
        ("topk:0", "above 0 and up to 1"),
        ("topk:1.5", "above 0 and up to 1"),
        ("topk:-0.1", "not a fraction"),
        ("topk:nan", "not a fraction"),
        ("topk:1_0", "not a fraction"),
        ("topk:.", "not a fraction"),
        ("topk:0.1:2", "not a fraction"),
        ("dgc:inf", "not a fraction"),
        ("sbc:1%", "not a fraction"),
        ("powersgd:0", "rank of at least 1"),
        ("powersgd:-1", "not a whole number"),
        ("powersgd:99999999999999999999", "not a whole number"),
    ],
)
def test_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_compression(text)
    message = str(caught.value)
    assert said in message
    assert repr(text) in message
    assert "qsgd:B" in message, "the valid forms are listed"


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "zip"},
        {"name": "qsgd"},
        {"name": "fp16", "bits": 4},
        {"name": "topk", "fraction": float("nan")},
        {"name": "topk", "fraction": 0.1, "rank": 1},
    ],
)
def test_specs_that_make_no_sense(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        CompressionSpec(**fields)  # type: ignore[arg-type]


def test_properties() -> None:
    by_name = {
        name: parse_compression(name)
        for name in (
            *("none", "fp16", "bf16", "fp8", "terngrad", "qsgd"),
            *("signsgd", "topk", "dgc", "sbc", "powersgd"),
        )
    }
    assert {n for n, s in by_name.items() if not s.has_feedback} == {"none", "terngrad", "qsgd"}
    assert {n for n, s in by_name.items() if s.has_momentum} == {"dgc"}
    assert {n for n, s in by_name.items() if s.wants_whole_tensors} == {"powersgd"}


def test_powersgd_needs_a_matrix() -> None:
    refuse_useless(parse_compression("powersgd:2"), [(10,), (4, 3)])
    refuse_useless(parse_compression("powersgd:2"), [(8, 1, 3)])
    refuse_useless(parse_compression("topk"), [(10,)])
    with pytest.raises(UsageError, match="powersgd on 1-D tensors.*the model's 3 trained tensors"):
        refuse_useless(parse_compression("powersgd:2"), [(10,), (), (1, 7)])


def test_parsing_needs_no_torch() -> None:
    code = (
        "import sys; from paceline.comm.compression import parse_compression; parse_compression('topk');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
