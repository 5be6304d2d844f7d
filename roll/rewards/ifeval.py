"""Instructions whose fulfilment a program can check: lengths, keywords, formats, case.

A row names its instructions in one of two ways:

    instruction_id_list: ["length_constraints:number_words", ...],
    kwargs: [{"relation": "at least", "num_words": 50}, ...]             (the IFEval benchmark)

    ground_truth: {"func_name": "validate_word_constraint", "N": 50, "quantifier": "at least"}
                                     (the RLVR-IFEval data of ROLL; also a list of these, or JSON)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from roll.rewards.functions import after_thinking

# The names of the second form: the check, then what its arguments are called there. Where that form
# counts exactly without an argument that says so, `exactly` is the value.
_BY_FUNCTION = {
    "verify_keywords": "keywords:existence keywords=keyword_list",
    "verify_keyword_frequency": ("keywords:frequency keyword=word frequency=N relation=exactly"),
    "validate_forbidden_words": "keywords:forbidden_words",
    "verify_letter_frequency": "keywords:letter_frequency let_frequency=N let_relation=exactly",
    "verify_paragraph_count": "length_constraints:number_paragraphs num_paragraphs=N",
    "validate_word_constraint": ("length_constraints:number_words num_words=N relation=quantifier"),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences num_sentences=N relation=quantifier"
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word num_paragraphs=N nth_paragraph=i"
    ),
    "verify_postscript": "detectable_content:postscript",
    "validate_placeholders": "detectable_content:number_placeholders num_placeholders=N",
    "verify_bullet_points": "detectable_format:number_bullet_lists num_bullets=N",
    "validate_title": "detectable_format:title",
    "validate_choice": "detectable_format:constrained_response",
    "validate_highlighted_sections": (
        "detectable_format:number_highlighted_sections num_highlights=N"
    ),
    "validate_sections": (
        "detectable_format:multiple_sections num_sections=N section_spliter=section_splitter"
    ),
    "validate_json_format": "detectable_format:json_format",
    "validate_repeat_prompt": "combination:repeat_prompt prompt_to_repeat=original_prompt",
    "validate_two_responses": "combination:two_responses",
    "validate_uppercase": "change_case:english_capital",
    "validate_lowercase": "change_case:english_lowercase",
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency capital_frequency=N capital_relation=quantifier"
    ),
    "validate_end": "startend:end_checker",
    "validate_quotation": "startend:quotation",
    "validate_no_commas": "punctuation:no_comma",
}


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
    """A part of 1.0 or 0.0 for each instruction, and `score`: 1.0 if all are followed, or with
    `reward_type: fraction` the share that is.

    None if the row has no instructions. One that is not known here raises.
    """
    instructions: list[tuple[str, Mapping[str, Any]]] = []
    if instruction_id_list is not None:
        names = _loaded(instruction_id_list)
        instructions = list(zip(names, _loaded(kwargs) or [{}] * len(names), strict=True))
    else:
        constraints = _loaded(ground_truth) or []
        for constraint in [constraints] if isinstance(constraints, Mapping) else constraints:
            function = constraint["func_name"]
            if function not in _BY_FUNCTION:
                raise ValueError(
                    f"instruction {function!r} is not known; known are {', '.join(_BY_FUNCTION)}"
                )
            name, *renamed = _BY_FUNCTION[function].split()
            arguments = dict(constraint)
            for argument, there in (pair.split("=") for pair in renamed):
                if there == "exactly":
                    arguments[argument] = there
                elif there in constraint:
                    arguments[argument] = constraint[there]
            instructions.append((name, arguments))
    if not instructions:
        return None
    text = after_thinking(response)
    parts: dict[str, float] = {}
    for index, (name, given) in enumerate(instructions):
        label = name if name not in parts else f"{name}#{index}"
        # Data files fill the arguments that an instruction does not have with null.
        arguments = {key: value for key, value in given.items() if value is not None}
        follows = _follows(name, text, arguments)
        parts[label] = float(bool(text) and follows)
    fraction = sum(parts.values()) / len(parts)
    return {**parts, "score": fraction if reward_type == "fraction" else float(fraction == 1.0)}


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.strip() else value or None


def _follows(name: str, text: str, given: Mapping[str, Any]) -> bool:
    """Whether a text follows one instruction of the benchmark, with its arguments."""
    bare, words = text.strip(), re.findall(r"\w+(?:['-]\w+)*", text)
    match name:
        case "keywords:existence":
            return all(_count_word(text, word) for word in given["keywords"])
        case "keywords:forbidden_words":
            return not any(_count_word(text, word) for word in given["forbidden_words"])
        case "keywords:frequency":
            count = _count_word(text, given["keyword"])
            return _compare(count, given.get("relation"), given["frequency"])
        case "keywords:letter_frequency":
            count = text.lower().count(given["letter"].lower())
            return _compare(count, given.get("let_relation"), given["let_frequency"])
        case "length_constraints:number_words":
            target = given["num_words"]
            slack = max(round(target * 0.1), 1)
            return _compare(len(words), given.get("relation"), target, slack)
        case "length_constraints:number_sentences":
            sentences = [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", bare) if part]
            return _compare(len(sentences), given.get("relation"), given["num_sentences"], 1)
        case "length_constraints:number_paragraphs":
            parts = re.split(r"\s*\*\s?\*\s?\*\s*", bare)
            return all(parts) and len(parts) == given["num_paragraphs"]
        case "length_constraints:nth_paragraph_first_word":
            parts = [part for part in re.split(r"\n\s*\n", bare) if part]
            number = given["nth_paragraph"]
            if len(parts) != given["num_paragraphs"] or not 1 <= number <= len(parts):
                return False
            first = re.search(r"\w+(?:['-]\w+)*", parts[number - 1])
            return first is not None and first[0].lower() == given["first_word"].lower()
        case "detectable_content:number_placeholders":
            return len(re.findall(r"\[[^\[\]]+\]", text)) >= given["num_placeholders"]
        case "detectable_content:postscript":
            start = rf"^\s*{re.escape(given['postscript_marker'])}\s*\S"
            return bool(re.search(start, text, re.MULTILINE | re.IGNORECASE))
        case "detectable_format:number_bullet_lists":
            return len(re.findall(r"^\s*[*-]\s+\S", text, re.MULTILINE)) == given["num_bullets"]
        case "detectable_format:number_highlighted_sections":
            found = re.findall(r"(\*{1,2})(?=[^*\s])[^*\n]+\1", text)
            return len(found) >= given["num_highlights"]
        case "detectable_format:title":
            return bool(re.search(r"<<[^<>\n]*\S[^<>\n]*>>", text))
        case "detectable_format:multiple_sections":
            heading = rf"^\W*{re.escape(given['section_spliter'])}\s+\w+"
            found = re.findall(heading, text, re.MULTILINE | re.IGNORECASE)
            return len(found) >= given["num_sections"]
        case "detectable_format:json_format":
            fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", bare, re.DOTALL | re.IGNORECASE)
            return _is_json(fenced[1] if fenced else text)
        case "detectable_format:constrained_response":
            answers = [f"My answer is {word}." for word in ("yes", "no", "maybe")]
            return bare in given.get("options", answers)
        case "combination:repeat_prompt":
            return bare.startswith(given["prompt_to_repeat"].strip())
        case "combination:two_responses":
            parts = [part.strip() for part in text.split("******")]
            return len(parts) == 2 and all(parts) and parts[0] != parts[1]
        case "startend:end_checker":
            return bare.lower().endswith(given["end_phrase"].strip().lower())
        case "startend:quotation":
            return len(bare) > 1 and bare[0] == '"' == bare[-1]
        case "change_case:english_capital":
            return any(map(str.isalpha, text)) and text == text.upper()
        case "change_case:english_lowercase":
            return any(map(str.isalpha, text)) and text == text.lower()
        case "change_case:capital_word_frequency":
            count = len(re.findall(r"\b[A-Z]+\b", text))
            return _compare(count, given.get("capital_relation"), given["capital_frequency"])
        case "punctuation:no_comma":
            return "," not in text
    known = ", ".join(value.split()[0] for value in _BY_FUNCTION.values())
    raise ValueError(f"instruction {name!r} is not known; known are {known}")


def _count_word(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _compare(count: int, relation: str | None, target: int, slack: int = 0) -> bool:
    relations = {
        "at least": count >= target,
        "at most": count <= target,
        "less than": count < target,
        "around": abs(count - target) <= slack,
        "exactly": count == target,
    }
    relation = relation or "at least"
    if relation not in relations:
        raise ValueError(f"relation {relation!r}; expected one of {', '.join(relations)}")
    return relations[relation]
