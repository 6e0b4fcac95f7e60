"""Writes tokenizer files of a byte-level vocabulary with K3's special tokens.

256 ranks, one per byte, then 256 special ids at the offsets they have in K3 (163584 + i there is
256 + i here). As released, the three tokens that delimit a chat's structure are not flagged
`special`: clients that detokenise themselves must not strip them, or their parsers see no
structure. `model/tokenizer.py` treats all 256 ids as special, whatever the flag says.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from model.tokenizer import CONFIG_FILE, NUM_SPECIAL_TOKENS, RANKS_FILE

FIRST_SPECIAL = 256
BYTE_VOCAB_SIZE = FIRST_SPECIAL + NUM_SPECIAL_TOKENS

END_OF_MESSAGE = "<|end_of_msg|>"
"""K3's stop token."""

_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    END_OF_MESSAGE: 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}

_STRUCTURE = frozenset({"<|open|>", "<|close|>", "<|sep|>"})


def special_id(name: str) -> int:
    """Id of a named special token in the byte-level vocabulary."""
    return FIRST_SPECIAL + _OFFSETS[name]


def write_tokenizer_files(folder: Path) -> None:
    """Write `tiktoken.model` and `tokenizer_config.json` into a folder."""
    lines = (f"{base64.b64encode(bytes([value])).decode()} {value}\n" for value in range(256))
    (folder / RANKS_FILE).write_text("".join(lines), encoding="ascii")
    added = {
        str(special_id(name)): {
            "content": name,
            "special": name not in _STRUCTURE,
            "normalized": False,
        }
        for name in _OFFSETS
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": END_OF_MESSAGE,
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1), encoding="utf-8")
