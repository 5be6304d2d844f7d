"""What each token of a sequence adds to the decoded text, worked out once per token id.

`tokenizer.decode` of a whole sequence does not say which token wrote which characters, and decoding token by token
loses characters whose bytes are spread over several tokens. Here every id is turned into its bytes once; a sequence is
then a walk over those bytes:

    TokenTexts(tokenizer)([15, 380, 102])   # ["The", " caf", "é"]
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes stand for themselves, the others are moved past 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


class TokenTexts:
    """Token ids to texts. Special tokens are visible; bytes that form no character show as the replacement glyph.

    The texts of a sequence join to its decoded text. A character of several tokens belongs to the last of them, and
    the tokens before it add "".
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a transformers tokenizer, or anything with `decode(ids)`."""
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        # The only thing that a decoder says about itself is its serialised form.
        kind = decoder.__getstate__().decode() if decoder is not None else ""
        self._is_byte_level = '"ByteLevel"' in kind
        self._has_fallback = '"ByteFallback"' in kind
        self._marks_spaces = '"Metaspace"' in kind or "▁" in kind
        self._added = {
            int(i): str(token)
            for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        }
        self._pieces: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def __call__(self, ids: Iterable[int]) -> list[str]:
        """One text per id."""
        texts: list[str] = []
        pending = False  # whether the decoder holds the first bytes of a character
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        known = self._texts
        for token_id in ids:
            text = known[token_id] if token_id in known else self._learn(token_id)
            if text is None or pending:
                text = decoder.decode(self._pieces[token_id])
                pending = bool(decoder.getstate()[0])
            texts.append(text)
        if pending:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def _learn(self, token_id: int) -> str | None:
        """The text of an id that always adds the same one; None if it depends on its neighbours."""
        piece = self._pieces[token_id] = self._bytes(token_id)
        try:
            self._texts[token_id] = piece.decode()
        except UnicodeDecodeError:
            self._texts[token_id] = None
        return self._texts[token_id]

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", "replace")
        name = self._name(token_id)
        if name is None:
            return f"<{token_id}?>".encode()  # ids past the vocabulary: rows that pad the embedding
        if self._is_byte_level and name:
            table = _byte_of_character()
            if all(character in table for character in name):
                return bytes(table[character] for character in name)
        if self._has_fallback and (match := _BYTE_FALLBACK.fullmatch(name)):
            return bytes([int(match[1], 16)])
        if self._marks_spaces:
            return name.replace("▁", " ").encode("utf-8", "replace")
        return str(self._tokenizer.decode([token_id])).encode("utf-8", "replace")

    def _name(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None if there is no such id."""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        if convert is None:
            return ""
        try:
            return convert(token_id)
        except (IndexError, KeyError, OverflowError, ValueError):
            return None
