"""K3's tokenizer: byte-level BPE ranks from `tiktoken.model`, special names from its config.

Text is data: `encode` never makes a special token, whatever the text spells. Control segments,
which only a renderer writes, go through `encode_control`.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tiktoken

from configs.errors import CheckpointError, TokenizerMissingError

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
NUM_SPECIAL_TOKENS = 256
"""Ids reserved after the ranks; those without a name are `<|reserved_token_{id}|>`."""

MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
"""Longest run of space or of non-space characters in one piece: the pre-split regex backtracks on
longer ones. Both limits are the release's, because cutting elsewhere changes the ids."""

# Letters outside Han, before and after a change of case. Same expression as Kimi K2.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PRE_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_UNKNOWN_BYTES = "\ufffd".encode()


class Tokenizer:
    """Text to token ids and back. Immutable after construction."""

    def __init__(self, ranks: Mapping[bytes, int], special_names: Mapping[int, str]) -> None:
        """Make a tokenizer of ranks `0..N-1` and names of ids in `N..N+255`.

        Raises:
            CheckpointError: Ranks have gaps or lack a byte, or names repeat or are out of range.
        """
        num_ranks = len(ranks)
        _check_ranks(ranks)
        names = _complete_names(special_names, first_id=num_ranks)
        self._specials = {name: token for token, name in names.items()}
        self._bytes = [b""] * num_ranks
        for token_bytes, rank in ranks.items():
            self._bytes[rank] = token_bytes
        self._bytes.extend(names[token].encode() for token in sorted(names))
        self._num_ranks = num_ranks
        self._encoding = tiktoken.Encoding(
            name="kimi_k3",
            pat_str=_PRE_SPLIT,
            mergeable_ranks=dict(ranks),
            special_tokens=self._specials,
        )

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer files of a checkpoint folder.

        Raises:
            TokenizerMissingError: The folder lacks one of the two files.
            CheckpointError: A file is damaged.
        """
        for name in (RANKS_FILE, CONFIG_FILE):
            if not (folder / name).is_file():
                raise TokenizerMissingError(
                    f"checkpoint {folder} has no {name}: text needs a tokenizer; send token ids, "
                    f"or copy {RANKS_FILE} and {CONFIG_FILE} into the folder"
                )
        return cls(_read_ranks(folder / RANKS_FILE), _read_names(folder / CONFIG_FILE))

    @property
    def vocab_size(self) -> int:
        """Ranks and special tokens."""
        return len(self._bytes)

    @property
    def ranks(self) -> dict[bytes, int]:
        """Token ids of the byte-pair ranks, by their bytes; a copy."""
        return {self._bytes[rank]: rank for rank in range(self._num_ranks)}

    @property
    def pattern(self) -> str:
        """Expression that text is split by before it is encoded."""
        return _PRE_SPLIT

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Special token ids by name, unnamed ones included."""
        return self._specials

    def is_special(self, token: int) -> bool:
        """Whether an id is a special token."""
        return self._num_ranks <= token < len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; never special ones. No BOS is added."""
        ids: list[int] = []
        for piece in _cut_pieces(text):
            ids.extend(self._encoding.encode_ordinary(piece))
        return ids

    def encode_control(self, text: str) -> list[int]:
        """Return the ids of a control segment, in which special names are special tokens."""
        ids: list[int] = []
        for piece in _cut_pieces(text):
            ids.extend(self._encoding.encode(piece, allowed_special="all"))
        return ids

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD.

        Special tokens are left out unless `with_special`. Ids outside the vocabulary read U+FFFD.
        """
        return self.decode_bytes(ids, with_special=with_special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int], *, with_special: bool = False) -> bytes:
        """Return the bytes of ids, not necessarily whole characters."""
        return b"".join(
            self._bytes[token] if 0 <= token < len(self._bytes) else _UNKNOWN_BYTES
            for token in ids
            if with_special or not self.is_special(token)
        )


class IncrementalDetokenizer:
    """Turns a growing answer into text, chunk by chunk; one per request.

    A chunk never holds half a character: bytes of an unfinished one wait for the next tokens. The
    chunks of all `push` calls and of `finish`, joined, equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, with_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._with_special = with_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that is complete now; may be empty."""
        return self._decoder.decode(
            self._tokenizer.decode_bytes(ids, with_special=self._with_special)
        )

    def finish(self) -> str:
        """Return what is left: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _cut_pieces(text: str) -> Iterator[str]:
    """Cut text as the release does before the pre-split."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        yield from _cut_runs(text[start : start + MAX_PIECE_CHARS])


def _cut_runs(piece: str) -> Iterator[str]:
    """Cut so that no run of space or of non-space characters is longer than `MAX_RUN_CHARS`."""
    if len(piece) <= MAX_RUN_CHARS:
        yield piece
        return
    start = run_start = 0
    is_space = piece[0].isspace()
    for index, char in enumerate(piece):
        if char.isspace() != is_space:
            is_space = not is_space
            run_start = index
        elif index - run_start == MAX_RUN_CHARS:
            yield piece[start:index]
            start = run_start = index
    yield piece[start:]


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Parse `base64 rank` lines.

    Not `tiktoken.load`: that caches files by path in a temporary folder and can serve a stale one.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except OSError as exc:
        raise CheckpointError(f"{file} cannot be read: {exc.strerror}") from exc
    except (ValueError, binascii.Error) as exc:
        raise CheckpointError(
            f"{file}: line {len(ranks) + 1} is not `base64 rank`; copy the file again"
        ) from exc
    return ranks


def _read_names(file: Path) -> dict[int, str]:
    """Names of special tokens by id, from `added_tokens_decoder`."""
    try:
        entries = json.loads(file.read_bytes())["added_tokens_decoder"]
        names = {int(token): str(entry["content"]) for token, entry in entries.items()}
    except OSError as exc:
        raise CheckpointError(f"{file} cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(
            f"{file} has no usable added_tokens_decoder ({exc!r}); copy the file again"
        ) from exc
    return names


def _check_ranks(ranks: Mapping[bytes, int]) -> None:
    num_ranks = len(ranks)
    if sorted(ranks.values()) != list(range(num_ranks)):
        raise CheckpointError(
            f"{RANKS_FILE} holds {num_ranks} tokens whose ranks are not 0..{num_ranks - 1}; "
            "copy the file again"
        )
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{RANKS_FILE} lacks {len(missing)} of the 256 single bytes, first {missing[0]:#04x}; "
            "copy the file again"
        )


def _complete_names(names: Mapping[int, str], *, first_id: int) -> dict[int, str]:
    """Give every reserved id a name and check the given ones."""
    end = first_id + NUM_SPECIAL_TOKENS
    outside = [token for token in names if not first_id <= token < end]
    if outside:
        raise CheckpointError(
            f"{CONFIG_FILE} names token {outside[0]}; special ids of this vocabulary are "
            f"{first_id}..{end - 1}"
        )
    complete = {
        token: names.get(token, f"<|reserved_token_{token}|>") for token in range(first_id, end)
    }
    if len(set(complete.values())) != NUM_SPECIAL_TOKENS:
        raise CheckpointError(f"{CONFIG_FILE} gives two special tokens the same name")
    return complete
