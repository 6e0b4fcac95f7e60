"""Incremental detokenizing equals decoding everything at once, for any bytes and any splits."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer import IncrementalDetokenizer, Tokenizer

BYTES = {bytes([value]): value for value in range(256)}
MERGES = ["\u4f60".encode()[:2], b"\xbd\xa0", b"ab", b"\xff\xf0"]
TOKENIZER = Tokenizer(BYTES | {merge: 256 + i for i, merge in enumerate(MERGES)}, {})

chunks_of_ids = st.lists(st.lists(st.integers(0, TOKENIZER.vocab_size + 2), max_size=6))
chunks_of_text = st.text().map(
    lambda text: [[byte] for byte in text.encode("utf-8", errors="replace")]
)


@given(chunks=chunks_of_ids | chunks_of_text, with_special=st.booleans())
def test_joined_chunks_equal_decode(chunks: list[list[int]], with_special: bool) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, with_special=with_special)
    text = "".join(detokenizer.push(chunk) for chunk in chunks) + detokenizer.finish()
    ids = [token for chunk in chunks for token in chunk]
    assert text == TOKENIZER.decode(ids, with_special=with_special)


@given(chunks=chunks_of_text)
def test_valid_text_never_shows_a_replacement(chunks: list[list[int]]) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    expected = bytes(byte for chunk in chunks for byte in chunk).decode()
    emitted = ""
    for chunk in chunks:
        emitted += detokenizer.push(chunk)
        assert expected.startswith(emitted)
    assert emitted == expected


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_encode_then_decode_is_the_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(data=st.binary())
def test_encoded_names_never_become_special_tokens(data: bytes) -> None:
    name = f"<|reserved_token_{TOKENIZER.vocab_size - 1}|>"
    text = name + base64.b64encode(data).decode() + name
    assert not any(TOKENIZER.is_special(token) for token in TOKENIZER.encode(text))
