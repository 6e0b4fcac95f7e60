"""From a conversation to the token ids of its prompt."""

from __future__ import annotations

from collections.abc import Iterable

from model.chat.markers import CLOSE, OPEN, SEP, MarkerIds
from model.chat.render import render_conversation
from model.chat.segments import Segment
from model.chat.values import Conversation
from model.tokenizer import Tokenizer
from model.tokenizer_files import END_OF_MESSAGE


def encode_conversation(conversation: Conversation, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the prompt, up to and including the generation prefix.

    Every segment is encoded on its own. Only control segments, which no client writes, become
    special tokens.

    Raises:
        InvalidRequestError: The conversation cannot be rendered.
        CheckpointError: The tokenizer lacks K3's markers.
    """
    return encode_segments(render_conversation(conversation), tokenizer)


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of segments, each encoded on its own.

    Raises:
        CheckpointError: The tokenizer lacks K3's markers.
    """
    ids = MarkerIds.of(tokenizer)
    control = {
        OPEN: ids.open,
        CLOSE: ids.close,
        SEP: ids.sep,
        END_OF_MESSAGE: ids.end_of_message,
    }
    tokens: list[int] = []
    for segment in segments:
        if segment.is_control:
            tokens.append(control[segment.text])
        else:
            tokens += tokenizer.encode(segment.text)
    return tokens
