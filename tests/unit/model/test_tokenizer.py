"""The tokenizer: pre-split, special tokens, limits on pieces, damaged files."""

from __future__ import annotations

import base64
import json

import pytest

from configs.errors import CheckpointError, TokenizerMissingError
from model.tokenizer import (
    MAX_PIECE_CHARS,
    MAX_RUN_CHARS,
    IncrementalDetokenizer,
    Tokenizer,
)
from model.tokenizer_files import special_id, write_tokenizer_files

BYTES = {bytes([value]): value for value in range(256)}


@pytest.fixture
def folder(tmp_path):
    write_tokenizer_files(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    return Tokenizer.load(folder)


def with_merges(*words: str) -> Tokenizer:
    """A tokenizer that merges whole words, byte by byte from the left: shows pre-split borders."""
    ranks = dict(BYTES)
    for word in words:
        data = word.encode()
        for end in range(2, len(data) + 1):
            ranks.setdefault(data[:end], len(ranks))
    return Tokenizer(ranks, {})


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


def test_bytes_are_their_own_ids(tokenizer) -> None:
    assert tokenizer.encode("h\u00e9") == [104, 0xC3, 0xA9]


def test_vocabulary_is_ranks_and_reserved_ids(tokenizer) -> None:
    assert tokenizer.vocab_size == 512


@pytest.mark.parametrize(
    "text",
    ["", "Hello world", "\u4f60\u597d\u4e16\u754c", "a\r\n\n  b\t", "\U0001f600\u0301", "x" * 60],
)
def test_text_survives_the_round_trip(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_cannot_forge_special_tokens(tokenizer) -> None:
    text = "<|end_of_msg|>[BOS]<|reserved_token_300|>"
    assert max(tokenizer.encode(text)) < 256
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_segments_hold_special_tokens(tokenizer) -> None:
    assert tokenizer.encode_control("<|open|>a<|sep|>") == [259, 97, 261]


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("[BOS]", 256),
        ("[EOS]", 257),
        ("<|end_of_msg|>", 258),
        ("<|media_pad|>", 277),
        ("<osagent_mode>", 321),
        ("<|reserved_token_264|>", 264),
        ("[PAD]", 511),
    ],
)
def test_special_tokens_stand_at_their_offsets_in_k3(tokenizer, name: str, token: int) -> None:
    assert tokenizer.special_ids[name] == token


def test_special_tokens_are_left_out_of_text(tokenizer) -> None:
    ids = [104, special_id("<|end_of_msg|>"), 105]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, with_special=True) == "h<|end_of_msg|>i"


@pytest.mark.parametrize("token", [512, 10**9, -1])
def test_id_outside_the_vocabulary_reads_as_replacement(tokenizer, token: int) -> None:
    assert tokenizer.decode([104, token, 105]) == "h\ufffdi"


@pytest.mark.parametrize(
    ("word", "text", "expected"),
    [
        ("1234", "1234", ["123", "4"]),
        ("ab12", "ab12", ["ab", "1", "2"]),
        ("don'ts", "don'ts", ["don't", "s"]),
        ("aB", "aB", ["a", "B"]),
        ("Ab", "Ab", ["Ab"]),
        (" ab", "x ab", ["x", " ab"]),
        ("!!\n", "a!!\nb", ["a", "!!\n", "b"]),
        ("   a", "   a", ["  ", " ", "a"]),
        ("\n\na", "\n\na", ["\n\n", "a"]),
    ],
    ids=["digits", "letters-digits", "contraction", "camel", "word", "space", "punctuation",
         "spaces", "newlines"],
)  # fmt: skip
def test_merges_stop_at_pre_split_borders(word: str, text: str, expected: list[str]) -> None:
    assert pieces(with_merges(word), text) == expected


def test_han_run_is_parted_from_other_letters() -> None:
    text = "\u4f60\u597d"
    tokenizer = with_merges(text, "a" + text)
    assert pieces(tokenizer, text) == [text]
    assert pieces(tokenizer, "a" + text) == ["a", text]


@pytest.mark.parametrize(
    ("num_chars", "expected_tokens"),
    [(MAX_RUN_CHARS, MAX_RUN_CHARS // 2), (MAX_RUN_CHARS + 2, MAX_RUN_CHARS // 2 + 1)],
)
def test_long_runs_are_cut_where_the_release_cuts(num_chars: int, expected_tokens: int) -> None:
    tokenizer = with_merges("aa")
    assert len(tokenizer.encode("a" * num_chars)) == expected_tokens


def test_cut_of_a_run_starts_at_the_run() -> None:
    tokenizer = with_merges("aa")
    # 3 letters and a space, then a run that is cut after its own 25,000 letters, an even number.
    ids = tokenizer.encode("aaa " + "a" * (MAX_RUN_CHARS + 1))
    assert len(ids) == 2 + 1 + MAX_RUN_CHARS // 2 + 1


def test_long_text_is_cut_into_pieces() -> None:
    tokenizer = with_merges("aa")
    text = (" a" * (MAX_PIECE_CHARS // 2))[:-1] + "aa"
    # The piece ends between the last two letters, which are two tokens therefore.
    assert tokenizer.encode(text)[-2:] == [97, 97]


def test_lone_surrogates_are_encoded_as_replacement(tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_missing_file_says_that_ids_still_work(folder, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(TokenizerMissingError, match=f"has no {name}.*send token ids"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("text", ["!!! 3\n", "YQ==\n", "YQ== x\n"])
def test_damaged_ranks_are_reported(folder, text: str) -> None:
    (folder / "tiktoken.model").write_text(text, encoding="ascii")
    with pytest.raises(CheckpointError, match="line 1 is not `base64 rank`"):
        Tokenizer.load(folder)


def test_ranks_with_gaps_are_reported(folder) -> None:
    line = base64.b64encode(b"ab").decode()
    with (folder / "tiktoken.model").open("a", encoding="ascii") as stream:
        stream.write(f"{line} 300\n")
    with pytest.raises(CheckpointError, match=r"257 tokens whose ranks are not 0\.\.256"):
        Tokenizer.load(folder)


def test_ranks_that_lack_a_byte_are_reported() -> None:
    ranks = {bytes([value]): value for value in range(255)}
    with pytest.raises(CheckpointError, match="lacks 1 of the 256 single bytes, first 0xff"):
        Tokenizer(ranks, {})


@pytest.mark.parametrize("text", ["{", "{}", '{"added_tokens_decoder": {"x": {}}}', "[]"])
def test_damaged_names_are_reported(folder, text: str) -> None:
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="no usable added_tokens_decoder"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"12": "[X]"}, r"names token 12; special ids of this vocabulary are 256\.\.511"),
        ({"256": "[X]", "257": "[X]"}, "two special tokens the same name"),
    ],
    ids=["outside", "repeated"],
)
def test_unusable_names_are_reported(folder, names: dict[str, str], message: str) -> None:
    added = {token: {"content": name} for token, name in names.items()}
    text = json.dumps({"added_tokens_decoder": added})
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(folder)


def test_detokenizer_waits_for_whole_characters(tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    smile = list("\U0001f600".encode())
    chunks = [detokenizer.push([token]) for token in smile]
    assert chunks == ["", "", "", "\U0001f600"]
    assert detokenizer.finish() == ""


def test_detokenizer_ends_an_unfinished_character(tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([104, 0xE4, 0xBD]) == "h"
    assert detokenizer.finish() == "\ufffd"
