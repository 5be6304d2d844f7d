"""Real chat templates over several turns: ids are only ever appended, and they spell the conversation."""

import logging

import pytest
from tiny_tokenizer import CHATML, bpe_tokenizer

from roll.datasets.chat_template import get_chat_template
from roll.pipeline.agentic.conversation import Conversation, DriftMonitor, first_difference
from roll.rollout.collate import collate
from roll.rollout.types import Trajectory, Turn

SYSTEM = {"role": "system", "content": "Answer 10 or 4."}
ANSWERS = ["a 10", "add\n", " 4?", "=4 10", "10"]
QUESTIONS = ["add 4?", "=4", " 1 4\n\n", "add", "? 10"]


def play(conversation, answers=ANSWERS, *, with_end=True, system=SYSTEM):
    """Five turns, as a manager plays them: (messages, turns)."""
    tokenizer = conversation.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [SYSTEM] if system else []
    turns = []
    for question, answer in zip(QUESTIONS, answers, strict=True):
        message = {"role": "user", "content": question}
        messages.append(message)
        text = (
            conversation.next_prompt(message, system=system)
            if turns
            else conversation.first_prompt(messages)
        )
        previous = turns[-1].response_ids if turns else []
        (prompt,) = conversation.tokenize([text], [previous])
        response = tokenizer(answer, add_special_tokens=False)["input_ids"] + (
            [end] if with_end else []
        )
        turns.append(
            Turn(
                prompt,
                response,
                [0.0] * len(response),
                finish_reason="stop" if with_end else "length",
            )
        )
    return messages, turns


def rendered(conversation, answers, *, system=SYSTEM):
    whole = [SYSTEM] if system else []
    for question, answer in zip(QUESTIONS, answers, strict=True):
        whole += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return conversation.template(whole, add_generation_prompt=False)


@pytest.mark.parametrize(
    "with_end", [True, False], ids=["answers end themselves", "answers are cut off"]
)
@pytest.mark.parametrize("system", [SYSTEM, None], ids=["system", "no system"])
def test_five_turns(with_end, system):
    conversation = Conversation(get_chat_template("native", bpe_tokenizer()))
    messages, turns = play(conversation, with_end=with_end, system=system)
    batch = collate([Trajectory("t", "g", "Tag", 0, 0, turns)], pad_token_id=0)
    ids, mask = batch["input_ids"][0], batch["response_mask"][0].bool()
    # The mask is 1 exactly on the sampled tokens ...
    assert ids[mask].tolist() == [token for turn in turns for token in turn.response_ids]
    runs = (mask.int().diff() == 1).sum().item()
    assert runs == 5
    # ... and all tokens together spell the conversation, once.
    whole = rendered(conversation, ANSWERS, system=system)
    text = conversation.tokenizer.decode(ids, skip_special_tokens=False)
    assert whole.startswith(text) and whole[len(text) :] in ("\n", "<|im_end|>\n")
    assert DriftMonitor(conversation).check(messages, turns)


def test_ids_are_those_of_sampling_not_of_tokenising_again():
    """` 1` and `0` sampled as two tokens stay two, although the tokenizer would merge them."""
    conversation = Conversation(get_chat_template("native", bpe_tokenizer()))
    tokenizer = conversation.tokenizer
    apart = (
        tokenizer(" 1", add_special_tokens=False)["input_ids"]
        + tokenizer("0", add_special_tokens=False)["input_ids"]
    )
    assert apart != tokenizer(" 10", add_special_tokens=False)["input_ids"]
    messages, turns = play(conversation)
    end = turns[0].response_ids[-1]
    turns[0] = Turn(turns[0].prompt_ids, [*apart, end], None)
    batch = collate([Trajectory("t", "g", "Tag", 0, 0, turns)], pad_token_id=0)
    start = len(turns[0].prompt_ids)
    assert batch["input_ids"][0, start : start + 3].tolist() == [*apart, end]
    assert DriftMonitor(conversation).check(messages, turns)  # the text is the same


def test_a_template_that_rewrites_history_is_reported_with_a_difference(caplog):
    """Like Qwen3: thoughts of answers before the last user message are removed."""
    forgetful = CHATML.replace(
        "{{ message['content'] }}",
        "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('?')[-1] }}"
        "{% else %}{{ message['content'] }}{% endif %}",
    )
    conversation = Conversation(get_chat_template("native", bpe_tokenizer(chat_template=forgetful)))
    answers = ["add?10", *ANSWERS[1:]]
    messages, turns = play(conversation, answers)
    monitor = DriftMonitor(conversation)
    with caplog.at_level(logging.WARNING, "roll"):
        assert not monitor.check(messages, turns)
        assert not monitor.check(messages, turns)
    assert (monitor.checked, monitor.different) == (2, 2)
    (record,) = [
        record
        for record in caplog.records
        if "renders a finished conversation differently" in record.message
    ]
    assert "'add?10" in record.message and "rendered at once" in record.message
    # The tokens stay what was read and written.
    assert conversation.text(turns[0].response_ids) == "add?10"


def test_first_difference_is_readable():
    shown = first_difference("abc<think>x</think>y", "abcy")
    assert (
        shown
        == "  read and written: 'abc' >>> '<think>x</think>y'\n  rendered at once: 'abc' >>> 'y'"
    )


def test_half_a_character_cannot_be_compared():
    conversation = Conversation(get_chat_template("native", bpe_tokenizer()))
    messages, turns = play(conversation)
    half = conversation.tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    turns[0] = Turn(turns[0].prompt_ids, half, None, finish_reason="length")
    assert DriftMonitor(conversation).check(messages, turns)
