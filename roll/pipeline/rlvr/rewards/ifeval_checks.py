"""Instructions whose fulfilment a program can check: lengths, keywords, formats, case.

A row names its instructions in one of two ways:

    instruction_id_list: ["length_constraints:number_words", ...], kwargs: [{"relation": "at least", "num_words": 50}]
    ground_truth: {"func_name": "validate_word_constraint", "N": 50, "quantifier": "at least"}      (or its JSON)

The first is the form of the IFEval benchmark, the second that of the RLVR-IFEval data that ROLL uses; a list of the
second is accepted, too. An instruction that is not known here raises, which drops the sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from roll.utils.scoring.answers import after_thinking

Check = Callable[..., bool]


def _compare(count: int, relation: str, target: int, *, slack: int = 0) -> bool:
    """`count` is at least, at most, less than, around or exactly `target`."""
    relations = {
        "at least": count >= target,
        "at most": count <= target,
        "less than": count < target,
        "around": abs(count - target) <= slack,
        "exactly": count == target,
    }
    if relation not in relations:
        raise ValueError(f"relation {relation!r}; expected one of {', '.join(relations)}")
    return relations[relation]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['-]\w+)*", text)


def _count_word(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _num_sentences(text: str) -> int:
    return len([part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", text.strip()) if part])


def _paragraphs(text: str, separator: str = r"\n\s*\n") -> list[str]:
    return [part.strip() for part in re.split(separator, text.strip())]


def _is_json(text: str) -> bool:
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fenced[1] if fenced else text)
    except json.JSONDecodeError:
        return False
    return True


def _nth_paragraph_starts(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    parts = [part for part in _paragraphs(text) if part]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    words = _words(parts[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.lower()


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    found = re.findall(
        rf"^\W*{re.escape(section_spliter)}\s+\w+", text, re.MULTILINE | re.IGNORECASE
    )
    return len(found) >= num_sections


_YES_NO_MAYBE = tuple(f"My answer is {word}." for word in ("yes", "no", "maybe"))

CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, keywords: all(_count_word(text, word) for word in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_count_word(text, w) for w in forbidden_words)
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation="at least": _compare(
        _count_word(text, keyword), relation, frequency
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation="at least": (
        _compare(text.lower().count(letter.lower()), let_relation, let_frequency)
    ),
    "length_constraints:number_words": lambda text, num_words, relation="at least": _compare(
        len(_words(text)), relation, num_words, slack=max(round(num_words * 0.1), 1)
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation="at least": (
        _compare(_num_sentences(text), relation, num_sentences, slack=1)
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        all(parts := _paragraphs(text, r"\s*\*\s?\*\s?\*\s*")) and len(parts) == num_paragraphs
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_starts,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": lambda text, postscript_marker: bool(
        re.search(rf"^\s*{re.escape(postscript_marker)}\s*\S", text, re.MULTILINE | re.IGNORECASE)
    ),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^\s*[*-]\s+\S", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        len(re.findall(r"(\*{1,2})(?=[^*\s])[^*\n]+\1", text)) >= num_highlights
    ),
    "detectable_format:title": lambda text: bool(re.search(r"<<[^<>\n]*\S[^<>\n]*>>", text)),
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:constrained_response": lambda text, options=_YES_NO_MAYBE: (
        text.strip() in options
    ),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: text.strip().startswith(
        prompt_to_repeat.strip()
    ),
    "combination:two_responses": _two_responses,
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: (
        len(text.strip()) > 1 and text.strip()[0] == '"' == text.strip()[-1]
    ),
    "change_case:english_capital": lambda text: (
        any(map(str.isalpha, text)) and text == text.upper()
    ),
    "change_case:english_lowercase": lambda text: (
        any(map(str.isalpha, text)) and text == text.lower()
    ),
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation="at least": (
        _compare(len(re.findall(r"\b[A-Z]+\b", text)), capital_relation, capital_frequency)
    ),
    "punctuation:no_comma": lambda text: "," not in text,
}

# Names of the second form: the check, and the names that its arguments have there.
_BY_FUNCTION: dict[str, tuple[str, dict[str, str]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}),
    "verify_keyword_frequency": ("keywords:frequency", {"word": "keyword", "N": "frequency"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"N": "let_frequency"}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}),
    "validate_word_constraint": (
        "length_constraints:number_words",
        {"N": "num_words", "quantifier": "relation"},
    ),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"N": "num_sentences", "quantifier": "relation"},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "i": "nth_paragraph"},
    ),
    "verify_postscript": ("detectable_content:postscript", {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}),
    "validate_title": ("detectable_format:title", {}),
    "validate_choice": ("detectable_format:constrained_response", {}),
    "validate_highlighted_sections": (
        "detectable_format:number_highlighted_sections",
        {"N": "num_highlights"},
    ),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"N": "num_sections", "section_splitter": "section_spliter"},
    ),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_repeat_prompt": (
        "combination:repeat_prompt",
        {"original_prompt": "prompt_to_repeat"},
    ),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"N": "capital_frequency", "quantifier": "capital_relation"},
    ),
    "validate_end": ("startend:end_checker", {}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}
# Where the function form counts exactly, and has no argument to say so.
_EXACT = {"verify_keyword_frequency": "relation", "verify_letter_frequency": "let_relation"}


def score(
    prompt: str,
    response: str,
    ground_truth: Any,
    *,
    instruction_id_list: Any = None,
    kwargs: Any = None,
    reward_type: str | None = None,
    **row: Any,
) -> dict[str, float] | None:
    """A part of 1.0 or 0.0 for each instruction; `score` is 1.0 if all are followed, or with `reward_type: fraction`
    the share that is. None if the row has no instructions."""
    text = after_thinking(response)
    instructions = read_instructions(ground_truth, instruction_id_list, kwargs)
    if not instructions:
        return None
    parts: dict[str, float] = {}
    for index, (name, arguments) in enumerate(instructions):
        label = name if name not in parts else f"{name}#{index}"
        parts[label] = float(bool(text) and CHECKS[name](text, **arguments))
    fraction = sum(parts.values()) / len(parts)
    return {**parts, "score": fraction if reward_type == "fraction" else float(fraction == 1.0)}


def read_instructions(
    ground_truth: Any, ids: Any = None, kwargs: Any = None
) -> list[tuple[str, dict[str, Any]]]:
    """Names of checks with their arguments, from either form."""
    if ids is not None:
        ids, kwargs = _loaded(ids), _loaded(kwargs) or [{}] * len(_loaded(ids))
        return [
            (_known(name), _given(arguments)) for name, arguments in zip(ids, kwargs, strict=True)
        ]
    constraints = _loaded(ground_truth)
    if isinstance(constraints, Mapping):
        constraints = [constraints]
    found = []
    for constraint in constraints or []:
        function = constraint["func_name"]
        if function not in _BY_FUNCTION:
            raise ValueError(
                f"instruction {function!r} is not known; known are {', '.join(_BY_FUNCTION)}"
            )
        name, renamed = _BY_FUNCTION[function]
        arguments = {
            renamed.get(key, key): value
            for key, value in _given(constraint).items()
            if key != "func_name"
        }
        if function in _EXACT:
            arguments[_EXACT[function]] = "exactly"
        accepted = CHECKS[name].__code__.co_varnames[1 : CHECKS[name].__code__.co_argcount]
        found.append((name, {key: value for key, value in arguments.items() if key in accepted}))
    return found


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.strip() else value or None


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Data files fill the arguments that an instruction does not have with null."""
    return {key: value for key, value in arguments.items() if value is not None}


def _known(name: str) -> str:
    if name not in CHECKS:
        raise ValueError(f"instruction {name!r} is not known; known are {', '.join(CHECKS)}")
    return name
