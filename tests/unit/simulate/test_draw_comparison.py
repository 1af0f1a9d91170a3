"""The picture of a comparison is a PNG that shows every router, for one load and for several."""

import struct

import pytest

from headrace.simulate.draw_comparison import draw_comparison


def make_rows(*loads: float) -> list[dict]:
    return [
        {
            "policy": policy,
            "load": load,
            "ttft_s_p50": 0.5 * slow,
            "ttft_s_p99": 9.0 * slow,
            "ttft_s_p90": 2.0 * slow,
            "hit_share_of_ideal": 0.4,
            "slo_share": 0.8 / slow,
        }
        for load in loads
        for policy, slow in (("headrace", 1.0), ("mooncake", 1.2), ("llm-d", 900.0))
    ]


@pytest.mark.parametrize("loads", [(0.9,), (0.4, 0.9, 1.1)])
def test_a_comparison_becomes_a_wide_png(tmp_path, loads):
    draw_comparison(make_rows(*loads), tmp_path / "deep" / "plot.png", title="made up")
    drawn = (tmp_path / "deep" / "plot.png").read_bytes()
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", drawn[16:24])
    assert width > 2 * height > 400
