"""Prompts with checkable answers: rows of a file, rendered and tokenised, and which of them come when.

table = load_table("math.jsonl")                         # prompt or messages; ground_truth; tag; anything else
prompts = encode_prompts(table, tokenizer, max_length=512)
draw = PromptSampler(prompts, shares={"math": 0.7, "code": 0.3}, seed=0)
batch = draw.batch(64)                                   # 44 prompts of math, 20 of code
more = draw.take("math", 3)                              # three more of one domain, where filters dropped some
save(draw.state_dict())                                  # the exact position
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.datasets.chat_template import ChatTemplate, get_chat_template
from roll.datasets.messages import Message, parse_messages
from roll.datasets.sampler import EpochSampler
from roll.datasets.summary import DataSummary, LengthStats
from roll.datasets.table import Row, Table
from roll.datasets.tokenizing import tokenize_rows
from roll.exceptions import DataError

if TYPE_CHECKING:  # importing transformers takes seconds, and only the name is needed
    from transformers import PreTrainedTokenizerBase

PROMPT_COLUMNS = ("prompt", "messages")
GROUND_TRUTH = "ground_truth"
EVERYTHING = "all"  # the one pool that prompts are drawn from when no shares are given

DomainOf = Callable[[Row], str]


@dataclass(frozen=True)
class Prompt:
    """One prompt as a pipeline takes it.

    Attributes:
        index: its number in the data set.
        ids: its tokens.
        text: what these tokens say, chat markup included.
        question: the prompt as it stands in the file: its text, or the content of the last message.
        row: all columns of the row that it was made from, which rewards get.
    """

    index: int
    ids: tuple[int, ...]
    text: str
    question: str
    ground_truth: Any
    tag: str
    domain: str
    row: Row


class PromptDataset:
    """Tokenised prompts, four bytes a token. The rows themselves stay in their table."""

    def __init__(
        self,
        table: Table,
        *,
        tokens: np.ndarray,
        lengths: np.ndarray,
        origins: np.ndarray,
        domains: Sequence[str],
        texts: Sequence[str],
        columns: PromptColumns,
        summary: DataSummary,
    ) -> None:
        self.table = table
        self.lengths = lengths
        """(N,) tokens of each prompt."""
        self.domains = domains
        """The domain of each prompt."""
        self.columns = columns
        self.summary = summary
        self._tokens = tokens
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._origins = origins
        self._texts = texts

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of a data set of {len(self)} prompts")
        row = self.table[int(self._origins[index])]
        return Prompt(
            index=index,
            ids=tuple(self._tokens[self._starts[index] : self._starts[index + 1]].tolist()),
            text=self._texts[index],
            question=str(self.columns.messages_of(row)[-1]["content"]),
            ground_truth=row.get(GROUND_TRUTH),
            tag=self.columns.tag_of(row),
            domain=self.domains[index],
            row=row,
        )

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True)
class PromptColumns:
    """Where a table keeps what a prompt is made of."""

    prompt: str
    """Text, or a conversation."""
    tag: str | None

    @classmethod
    def find(
        cls, table: Table, *, prompt: str | None, messages: str | None, tag: str | None
    ) -> PromptColumns:
        """The columns that were named, else `prompt` or `messages`; DataError with the columns there are, if not."""
        named = prompt or messages
        if named is not None:
            key = "prompt" if prompt else "messages"
            table.require_columns([named], f"Name the column of the prompts in data_args.{key}")
        found = [column for column in PROMPT_COLUMNS if column in table.columns]
        if named is None and not found:
            table.require_columns(
                PROMPT_COLUMNS[:1],
                "Name the column of the prompts in data_args.prompt or .messages",
            )
        return cls(named or found[0], tag if tag in table.columns else None)

    def messages_of(self, row: Row) -> list[Message]:
        """The prompt as a conversation. ValueError, without a place, for a row that has none."""
        value = row.get(self.prompt)
        messages = parse_messages(value)
        if messages is not None:
            return messages
        if not isinstance(value, str):
            raise ValueError(f"column {self.prompt!r} has no prompt in it")
        return [{"role": "user", "content": value}]

    def tag_of(self, row: Row) -> str:
        value = row.get(self.tag) if self.tag is not None else None
        return "" if value is None else str(value)


def encode_prompts(
    table: Table,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    template: str = "native",
    tag_to_template: Mapping[str, str] | None = None,
    prompt_key: str | None = None,
    messages_key: str | None = None,
    tag_key: str | None = "tag",
    domain_of: DomainOf = lambda row: EVERYTHING,
    template_options: Callable[[Row], Mapping[str, Any]] = lambda row: {},
    show_progress: bool = True,
) -> PromptDataset:
    """Render and tokenise every row; `.summary` of the result counts what was left out.

    Prompts longer than `max_length` tokens are left out, never cut. `domain_of(row)` names the domain of a row and may
    raise DataError; `tag_to_template` chooses another chat template for the rows of a tag; `template_options(row)` are
    further arguments of the template.

    Raises DataError for a missing column (naming those there are), for a row without a prompt (with file and line), and
    if no prompt is left.
    """
    columns = PromptColumns.find(table, prompt=prompt_key, messages=messages_key, tag=tag_key)
    templates = {
        tag: get_chat_template(name, tokenizer) for tag, name in (tag_to_template or {}).items()
    }
    default = get_chat_template(template, tokenizer)
    summary = DataSummary(
        {"too_long": f"longer than {max_length:,} tokens", "empty_prompt": "with an empty prompt"}
    )
    tokens, lengths, origins = (array(code) for code in "iqq")
    texts: list[str] = []
    domains: list[str] = []
    longest = 0

    rendered = _render(table, columns, default, templates, domain_of, template_options, summary)
    title = "Encoding prompts" if show_progress else ""
    rows = tokenize_rows(
        tokenizer, rendered, lambda row: row[1:2], summary, title=title, total=len(table)
    )
    for (index, text, domain), (ids,) in rows:
        longest = max(longest, len(ids))
        if len(ids) > max_length or not ids:
            summary.drop("too_long" if ids else "empty_prompt", table.where(index))
            continue
        tokens.extend(ids)
        lengths.append(len(ids))
        origins.append(index)
        texts.append(text)
        domains.append(domain)
    if not lengths:
        raise DataError(
            f"{table.name}: no prompt is left. The longest of them has {longest:,} tokens and prompt_length is "
            f"{max_length:,}; raise prompt_length, or shorten the prompts.\n{summary}"
        )
    summary.kept = len(lengths)
    length_array = np.frombuffer(lengths, dtype=np.int64)
    summary.lengths = {"prompt": LengthStats.of(length_array)}
    return PromptDataset(
        table,
        tokens=np.frombuffer(tokens, dtype=np.int32),
        lengths=length_array,
        origins=np.frombuffer(origins, dtype=np.int64),
        domains=domains,
        texts=texts,
        columns=columns,
        summary=summary,
    )


def _render(
    table: Table,
    columns: PromptColumns,
    default: ChatTemplate,
    templates: Mapping[str, ChatTemplate],
    domain_of: DomainOf,
    template_options: Callable[[Row], Mapping[str, Any]],
    summary: DataSummary,
) -> Iterator[tuple[int, str, str]]:
    """(row number, text, domain) of the rows that have a prompt."""
    for index, row in enumerate(table):
        summary.rows_read += 1
        try:
            messages = columns.messages_of(row)
            if not any(message["content"].strip() for message in messages):
                summary.drop("empty_prompt", table.where(index))
                continue
            template = templates.get(columns.tag_of(row), default)
            text = template(messages, add_generation_prompt=True, **template_options(row))
            yield index, text, domain_of(row)
        except ValueError as error:  # DataError is one
            raise DataError(f"{table.where(index)}: {error}") from error


def domain_sizes(num_prompts: int, shares: Mapping[str, float]) -> dict[str, int]:
    """How many of `num_prompts` each domain gets: its share, rounded down, and the last domain what remains.

    Example: 64 prompts at 0.7 and 0.3 are 44 and 20. (ROLL's rule, with the shares of exact fractions exact: 0.29 of
    100 is 29, though as floats the product is below it.)
    """
    names = list(shares)
    sizes = {name: int(num_prompts * shares[name] + 1e-9) for name in names[:-1]}
    sizes[names[-1]] = num_prompts - sum(sizes.values())
    return sizes


class PromptSampler:
    """Prompts in an order that seed and position decide, domain by domain, epoch after epoch.

    With `shares`, each domain has an order of its own, so that drawing more from one changes nothing for the others.
    Without, all prompts form one pool, and domains come as often as their rows.
    """

    def __init__(
        self, dataset: PromptDataset, *, seed: int, shares: Mapping[str, float] | None = None
    ) -> None:
        self.dataset = dataset
        self.shares = dict(shares) if shares else {EVERYTHING: 1.0}
        self._rows: dict[str, np.ndarray] = {}
        self._samplers: dict[str, EpochSampler] = {}
        domains = np.asarray(dataset.domains, dtype=object)
        for number, name in enumerate(self.shares):
            rows = np.flatnonzero(domains == name) if shares else np.arange(len(dataset))
            if not len(rows):
                there = ", ".join(sorted(set(dataset.domains)))
                raise DataError(
                    f"{dataset.table.name}: domain {name!r} of domain_interleave_probs has no prompt; the prompts are "
                    f"of {there}. Rows get their domain from the column `domain`, or from rewards.*.tag_included"
                )
            self._rows[name] = rows
            self._samplers[name] = EpochSampler(len(rows), 1, seed + 7919 * number)

    def batch(self, num_prompts: int) -> list[Prompt]:
        """The next prompts, domain after domain, each domain as many as its share says."""
        sizes = domain_sizes(num_prompts, self.shares)
        return [prompt for name, size in sizes.items() for prompt in self.take(name, size)]

    def take(self, pool: str, num_prompts: int) -> list[Prompt]:
        """The next prompts of one domain (of `EVERYTHING`, where there are no shares)."""
        sampler, rows = self._samplers[pool], self._rows[pool]
        return [self.dataset[int(rows[sampler.next_batch()[0]])] for _ in range(num_prompts)]

    def pool_of(self, prompt: Prompt) -> str:
        return prompt.domain if prompt.domain in self._samplers else EVERYTHING

    @property
    def epoch(self) -> float:
        """Passes over the data so far, over the pool that is ahead of the others."""
        return max(
            sampler.epoch + sampler.index / sampler.num_rows for sampler in self._samplers.values()
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: sampler.state_dict() for name, sampler in self._samplers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. DataError if it belongs to other data, domains or seed."""
        if set(state) != set(self._samplers):
            raise DataError(
                f"the saved position is of the domains {', '.join(state)}, this run has {', '.join(self._samplers)}: "
                "resume with the data of the first run, or start anew"
            )
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(state[name])
