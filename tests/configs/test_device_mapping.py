"""device_mapping is read as data: lists, ranges and sums of them, and nothing is ever run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.device_mapping import parse_device_mapping


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("list(range(0,8))", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("list(range(0, 8, 2))", [0, 2, 4, 6]),
        ("list(range(3))", [0, 1, 2]),
        ("range(2, 4)", [2, 3]),
        ("[0, 1]", [0, 1]),
        ("0, 1", [0, 1]),
        (" [5] ", [5]),
        ("list(range(0,2)) + [6, 7]", [0, 1, 6, 7]),
        ("list(range(0,1)) + list(range(4,6)) + [9]", [0, 4, 5, 9]),
        ("list([1, 2])", [1, 2]),
        ([3, 1], [3, 1]),
        ((0, 1), [0, 1]),
    ],
)
def test_forms_that_roll_files_use(written, devices):
    assert parse_device_mapping(written) == devices


@pytest.mark.parametrize(
    "written",
    [
        *("all", "0-3", "3", 3, {"a": 1}, ["a"], [1.5], [True], [-1], "", "1 + 2"),
        *(
            "list(range('8'))",
            "list(8)",
            "[0, 'a']",
            "[-1]",
            "[[0]]",
            "list(range(0, 8, 0))",
            "list(range(0,8)",
        ),
        *("open('x')", "__import__('os').system('false')", "[i for i in range(8)]"),
    ],
)
def test_what_is_no_list_of_numbers_says_how_to_write_one(written):
    with pytest.raises(
        ValueError, match=r"expected a list of GPU numbers; write \[0, 1\], list\(range\(0,8\)\)"
    ):
        parse_device_mapping(written)


def test_empty_repeated_and_absurd_lists():
    with pytest.raises(ValueError, match=r"at least one GPU number; leave the key out"):
        parse_device_mapping("list(range(4,4))")
    with pytest.raises(ValueError, match=r"every GPU once; 1 is named twice"):
        parse_device_mapping("[0, 1] + [1]")
    with pytest.raises(ValueError, match=r"at most 65536 GPUs, not 1000000000000"):
        parse_device_mapping("list(range(0, 10**12))".replace("10**12", "1000000000000"))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 5))
def test_ranges_mean_what_python_means(start, length, step):
    stop = start + length
    assert parse_device_mapping(f"list(range({start},{stop},{step}))") == list(
        range(start, stop, step)
    )


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_any_text_gives_a_list_or_a_value_error(text):
    try:
        devices = parse_device_mapping(text)
    except ValueError:
        return
    assert devices and all(type(device) is int and device >= 0 for device in devices)
