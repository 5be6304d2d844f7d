"""Makes a small set of preference pairs: questions about three digits, with the right digit chosen
over a wrong one.

    python examples/dpo/make_data.py output/dpo-data

writes `train.jsonl` and `validation.jsonl` into that folder, one pair a line:

    {"instruction": "Which is the largest: 3, 7 or 2?", "chosen": "7", "rejected": "3"}

With `--model`, a tiny model with random weights and a tokenizer of characters is written to
`model/` in that folder: all that `examples/dpo/dpo_tiny.yaml` needs, made from nothing.

The wrong digit is one of the three as well, and half of the questions ask for the smallest: a model
that prefers one digit to another without reading the question is right half of the time. No
question is in both files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

CHOICES = {"largest": max, "smallest": min}


def make_pairs(seed: int) -> list[dict[str, str]]:
    """All 1,440 questions in an order drawn from `seed`, each with one right and one wrong
    answer."""
    draw = random.Random(seed)
    pairs = []
    for (word, choose), digits in itertools.product(
        CHOICES.items(), itertools.permutations(range(10), 3)
    ):
        right = choose(digits)
        wrong = draw.choice([digit for digit in digits if digit != right])
        first, second, third = digits
        question = f"Which is the {word}: {first}, {second} or {third}?"
        pairs.append({"instruction": question, "chosen": str(right), "rejected": str(wrong)})
    draw.shuffle(pairs)
    return pairs


def write_pairs(path: Path, pairs: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    print(f"{path}: {len(pairs)} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where to write train.jsonl and validation.jsonl")
    parser.add_argument(
        "--train", type=int, default=1200, help="pairs to train on (default %(default)s)"
    )
    parser.add_argument(
        "--validation", type=int, default=200, help="pairs to validate on (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the draw (default %(default)s)"
    )
    parser.add_argument(
        "--model", action="store_true", help="make a tiny model in FOLDER/model as well"
    )
    options = parser.parse_args()

    pairs = make_pairs(options.seed)
    if (
        options.train < 1
        or options.validation < 1
        or options.train + options.validation > len(pairs)
    ):
        parser.error(
            f"--train and --validation must be at least 1 and together at most {len(pairs)}"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    write_pairs(options.folder / "train.jsonl", pairs[: options.train])
    write_pairs(
        options.folder / "validation.jsonl",
        pairs[options.train : options.train + options.validation],
    )
    if options.model:
        from roll.models.tiny import make_tiny_model  # needs torch, which the pairs do not

        print(
            f"{make_tiny_model(options.folder / 'model', seed=options.seed)}: a tiny model with random weights"
        )


if __name__ == "__main__":
    main()
