"""Everything that the examples of this folder need, made from nothing: small tasks on digit strings
and a tiny model.

    python examples/rlvr/make_data.py [--seed 0] [--output output/digits]

    task       prompt     answer          prompts
    reverse    12345<     54321           20,000 to train on, 500 held out
    sort       314159>    113459          20,000 and 500
    add        12+7=      19              every sum of a two-digit and a one-digit number; 100 held out

Each task becomes OUTPUT/TASK_train.jsonl and OUTPUT/TASK_test.jsonl, one row a line:

    {"prompt": "12345<", "ground_truth": "54321", "tag": "reverse"}

OUTPUT/model is a Qwen2 of 134,000 random parameters with a tokenizer for these characters.
Everything depends on the seed alone.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from roll.models.tiny import make_tiny_model

CHARACTERS = "0123456789<>+-=*#? "

Row = dict[str, str]


def digit_strings(length: int, num: int, rng: random.Random) -> list[str]:
    """`num` different strings of digits."""
    seen: dict[str, None] = {}
    while len(seen) < num:
        seen.setdefault("".join(rng.choice("0123456789") for _ in range(length)))
    return list(seen)


def reverse(rng: random.Random) -> tuple[list[Row], list[Row]]:
    return split(
        [row("reverse", f"{text}<", text[::-1]) for text in digit_strings(5, 20_500, rng)], 500
    )


def sort(rng: random.Random) -> tuple[list[Row], list[Row]]:
    return split(
        [row("sort", f"{text}>", "".join(sorted(text))) for text in digit_strings(6, 20_500, rng)],
        500,
    )


def add(rng: random.Random) -> tuple[list[Row], list[Row]]:
    sums = [row("add", f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10)]
    rng.shuffle(sums)
    return split(sums, 100)


def row(tag: str, prompt: str, answer: str) -> Row:
    return {"prompt": prompt, "ground_truth": answer, "tag": tag}


def split(rows: list[Row], num_held_out: int) -> tuple[list[Row], list[Row]]:
    return rows[num_held_out:], rows[:num_held_out]


TASKS: dict[str, Callable[[random.Random], tuple[list[Row], list[Row]]]] = {
    "reverse": reverse,
    "sort": sort,
    "add": add,
}


def make(folder: Path, seed: int = 0) -> Path:
    """Write data and model to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {name: task(random.Random(f"{seed}-{name}")) for name, task in TASKS.items()}
    for name, (train, test) in tables.items():
        for part, rows in (("train", train), ("test", test)):
            text = "".join(json.dumps(entry) + "\n" for entry in rows)
            (folder / f"{name}_{part}.jsonl").write_text(text, encoding="utf-8")
    make_tiny_model(folder / "model", CHARACTERS, seed=seed)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("output/digits"))
    args = parser.parse_args()
    folder = make(args.output, args.seed)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    main()
