"""The script that makes the data of the DPO example: right answers, no question in both files, the same every time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tiny_models import tiny_tokenizer

from roll.datasets.files import load_table
from roll.datasets.preference import encode_preferences

SCRIPT = Path(__file__).parents[2] / "examples" / "dpo" / "make_data.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_the_pairs_are_right_and_separate(tmp_path: Path) -> None:
    result = run(str(tmp_path / "data"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"{tmp_path}/data/train.jsonl: 1200 pairs",
        f"{tmp_path}/data/validation.jsonl: 200 pairs",
    ]
    rows = [
        [json.loads(line) for line in (tmp_path / "data" / f"{n}.jsonl").open()]
        for n in ("train", "validation")
    ]
    questions = [{row["instruction"] for row in part} for part in rows]
    assert [len(part) for part in questions] == [1200, 200]
    assert not questions[0] & questions[1]
    for row in rows[0] + rows[1]:
        match = re.fullmatch(
            r"Which is the (largest|smallest): (\d), (\d) or (\d)\?", row["instruction"]
        )
        assert match is not None
        digits = match.groups()[1:]
        assert row["chosen"] == (max if match[1] == "largest" else min)(digits)
        assert row["rejected"] in digits and row["rejected"] != row["chosen"]
    larger_chosen = sum(row["chosen"] > row["rejected"] for row in rows[1])
    assert 70 < larger_chosen < 130  # preferring large digits does not help

    dataset = encode_preferences(
        load_table(tmp_path / "data" / "train.jsonl"), tiny_tokenizer(), max_length=128
    )
    assert (dataset.summary.kept, dataset.summary.num_dropped) == (1200, 0)


def test_the_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert (
            run(
                str(tmp_path / name), "--seed", seed, "--train", "50", "--validation", "10"
            ).returncode
            == 0
        )
    texts = [(tmp_path / name / "train.jsonl").read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]


def test_more_than_there_are(tmp_path: Path) -> None:
    result = run(str(tmp_path), "--train", "1400", "--validation", "100")
    assert result.returncode == 2
    assert "together at most 1440" in result.stderr
