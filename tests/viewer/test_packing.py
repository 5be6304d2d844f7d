"""Numbers on their way to the page and back."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from report_reader import unpack

from roll.viewer.packing import Packer, finite_json, pack_json, significant


def round_trip(values: list[float], finest: float = 1e-4) -> np.ndarray:
    packer = Packer()
    packer.add_numbers("x", np.array(values), finest)
    return unpack(packer.pack())["columns"]["x"]


def test_numbers_come_back_rounded_to_the_step() -> None:
    np.testing.assert_allclose(
        round_trip([0.0, -1.23456, 0.00004, 3.2]), [0.0, -1.2346, 0.0, 3.2], atol=1e-12
    )


def test_a_column_of_small_numbers_keeps_four_digits() -> None:
    np.testing.assert_allclose(round_trip([1.23456e-6, -9.8e-7]), [1.235e-6, -9.8e-7], rtol=1e-12)


def test_large_numbers_keep_what_float32_holds() -> None:
    np.testing.assert_allclose(round_trip([1e12, -3.5]), [1e12, -3.5], rtol=1e-7)


def test_what_is_not_finite_stays_so() -> None:
    values = round_trip([1.0, math.nan, math.inf, -math.inf])
    assert (
        values[0] == 1.0
        and math.isnan(values[1])
        and values[2] == math.inf
        and values[3] == -math.inf
    )


def test_a_column_of_zeros_costs_no_plane() -> None:
    packer = Packer()
    packer.add_numbers("x", np.zeros(1000))
    header = unpack(packer.pack())
    assert header["columns"]["x"].tolist() == [0.0] * 1000
    assert len(packer.pack()) < 200


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4), max_size=30),
    st.lists(st.integers(0, 2**32 - 1), max_size=20),
    st.sampled_from([1e-2, 1e-3, 1e-4]),
)
def test_any_columns_come_back(numbers: list[float], whole: list[int], finest: float) -> None:
    packer = Packer()
    packer.add_numbers("numbers", np.array(numbers, dtype=float), finest)
    packer.add_whole("whole", whole)
    header = unpack(packer.pack(note="kept"))
    np.testing.assert_allclose(header["columns"]["numbers"], numbers, atol=0.5001 * finest)
    assert header["columns"]["whole"].tolist() == whole and header["note"] == "kept"


def test_json_that_no_browser_would_read_is_named() -> None:
    value = {"a": [math.nan, -math.inf, 1.5], 3: (True, None, 2**70), "path": {1: object}}
    plain = finite_json(value)
    assert plain["a"] == ["NaN", "-Infinity", 1.5] and plain["3"] == [True, None, 2**70]
    assert unpack(pack_json({"text": "</script>\u2028\ud800"}))["text"] == "</script>\u2028\ud800"


def test_packed_text_holds_nothing_that_could_end_a_script() -> None:
    packed = pack_json({"text": '</script>"\\\n' * 100})
    assert set(packed) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")


def test_significant_digits() -> None:
    assert significant(1.23456789, 4) == 1.235 and significant(None) is None
    kept = significant(math.nan)
    assert kept is not None and math.isnan(kept)
