"""Stop texts and chats: what is shown is the same however the tokens arrive."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.request_channel import TokenLogprobs
from cluster.api.answer_shaper import AnswerShaper, PlainReader
from cluster.api.answers import Chunk
from cluster.api.stop_scanner import StopTexts
from model.chat.parser import ChatParser
from model.chat.values import ReasoningDelta, TextDelta
from model.tokenizer import IncrementalDetokenizer, Tokenizer
from model.tokenizer_files import special_id, write_tokenizer_files

# Bytes, and tokens that hold parts of characters and several letters.
MERGES = ["\u20ac".encode()[:2], b"\xacb", b"ab", b"aba", b"b\xe2"]
RANKS = {bytes([value]): value for value in range(256)}
TOKENIZER = Tokenizer(RANKS | {merge: 256 + i for i, merge in enumerate(MERGES)}, {})
END = 261

texts = st.text(alphabet="ab\u20ac", max_size=16)
stop_lists = st.lists(st.text(alphabet="ab\u20ac", min_size=1, max_size=5), max_size=4)
splits = st.lists(st.integers(0, 64), max_size=6)
any_tokens = st.lists(
    st.sampled_from([*b"ab", *"\u20ac".encode(), *range(256, 261)]) | st.integers(0, 255),
    max_size=24,
)


def shaper(*stops, **kwargs):
    reader = PlainReader(IncrementalDetokenizer(TOKENIZER))
    return AnswerShaper(reader, stop_texts=StopTexts(stops), **kwargs)


def logprobs_of(ids):
    return [TokenLogprobs(-float(index)) for index in range(len(ids))]


def run(shaped, ids, cuts):
    """All chunks of an answer that arrives in pieces."""
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    logprobs = logprobs_of(ids)
    pieces = itertools.pairwise(bounds)
    chunks = [shaped.push(ids[a:b], logprobs[a:b]) for a, b in pieces]
    return [chunk for chunk in (*chunks, shaped.finish()) if chunk is not None]


def joined(chunks):
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs]
    return "".join(chunk.text for chunk in chunks), token_ids, logprobs


def reference(ids, stops, *, min_tokens=0, is_included=False):
    """Text, ids and stop text of an answer, from decoding every beginning of it anew."""
    num_chars = 0
    for count in range(1, len(ids) + 1):
        detokenizer = IncrementalDetokenizer(TOKENIZER)
        text = detokenizer.push(ids[:count])
        for end in range(num_chars + 1, len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found and count >= min_tokens:
                longest = max(found, key=len)
                shown = text[: end if is_included else end - len(longest)]
                return shown, ids[:count], longest
        num_chars = len(text)
    return TOKENIZER.decode(ids), ids, None


def test_ids_of_text_that_is_held_back_wait_with_it():
    shaped = shaper("ac")
    assert shaped.push(b"ba") == Chunk((ord("b"),), "b")
    assert shaped.push(b"b") == Chunk(tuple(b"ab"), "ab")


def test_ids_up_to_the_stop_text_are_released_and_its_text_is_not():
    shaped = shaper("bc")
    assert shaped.push(b"abcd") == Chunk(tuple(b"abc"), "a")
    assert (shaped.matched, shaped.num_tokens) == ("bc", 3)
    assert shaped.push(b"e") is None
    assert shaped.finish() is None


def test_text_before_a_stop_text_inside_one_token_is_shown():
    shaped = shaper("b")
    assert shaped.push([259]) == Chunk((259,), "a")


def test_text_that_is_held_back_is_shown_at_the_end():
    shaped = shaper("bcd")
    assert shaped.push(b"abc") == Chunk((ord("a"),), "a")
    assert shaped.finish() == Chunk(tuple(b"bc"), "bc")


def test_text_held_back_before_a_stop_token_comes_with_it():
    shaped = shaper("bc", stop_ids=[ord("!")])
    assert shaped.push(b"b!") is None
    assert shaped.finish() == Chunk(tuple(b"b!"), "b")


def test_stop_text_before_min_tokens_is_plain_text():
    shaped = shaper("a", min_tokens=3)
    assert shaped.push(b"aaba") == Chunk(tuple(b"aaba"), "aab")
    assert shaped.matched == "a"


def test_stop_text_across_the_part_that_the_client_holds_is_found():
    shaped = shaper("bc", resume_offset=2)
    assert shaped.push(b"abcd") == Chunk((ord("c"),), "")
    assert shaped.matched == "bc"


@settings(deadline=None, max_examples=1000)
@given(
    text=texts,
    stops=stop_lists,
    cuts=splits,
    min_tokens=st.integers(0, 6),
    is_included=st.booleans(),
)
def test_streamed_is_unstreamed_is_the_slow_reference(text, stops, cuts, min_tokens, is_included):
    ids = TOKENIZER.encode(text)
    options = {"min_tokens": min_tokens, "includes_stop_text": is_included}
    streamed, whole = shaper(*stops, **options), shaper(*stops, **options)
    shown, released, matched = reference(ids, stops, min_tokens=min_tokens, is_included=is_included)
    expected = (shown, released, logprobs_of(ids)[: len(released)])
    assert joined(run(streamed, ids, cuts)) == expected
    assert joined(run(whole, ids, [])) == expected
    assert streamed.matched == whole.matched == matched
    assert streamed.num_tokens == len(released)


@settings(deadline=None, max_examples=500)
@given(ids=any_tokens, stops=stop_lists, cuts=splits)
def test_any_bytes_come_as_whole_characters_and_never_what_follows_a_stop(ids, stops, cuts):
    shown, released, _ = reference(ids, stops)
    chunks = run(shaper(*stops), ids, cuts)
    so_far = ""
    for chunk in chunks:
        so_far += chunk.text
        assert shown.startswith(so_far)
        so_far.encode()
    assert joined(chunks)[:2] == (shown, released)


@settings(deadline=None, max_examples=300)
@given(text=texts, stops=stop_lists, cuts=splits, offset=st.integers(0, 20))
def test_resumed_answer_goes_on_where_the_unbroken_one_was(text, stops, cuts, offset):
    ids = TOKENIZER.encode(text)
    _, released, matched = reference(ids, stops)
    offset = min(offset, len(released))
    resumed = shaper(*stops, resume_offset=offset)
    assert joined(run(resumed, ids, cuts))[1] == released[offset:]
    assert resumed.matched == matched


@settings(deadline=None, max_examples=100)
@given(ids=any_tokens, cuts=splits)
def test_without_stop_texts_joined_text_is_that_of_all_tokens(ids, cuts):
    assert joined(run(shaper(), ids, cuts))[:2] == (TOKENIZER.decode(ids), ids)


# Chats


def chat_tokenizer(folder):
    write_tokenizer_files(folder)
    return Tokenizer.load(folder)


def answer_of(thought, text):
    """Ids of an answer in the chat format, after a prompt that ends inside the thinking."""
    open_, close, sep = (special_id(f"<|{name}|>") for name in ("open", "close", "sep"))
    return [
        *thought.encode(), close, *b"think", sep,
        open_, *b"response", sep, *text.encode(), close, *b"response", sep,
        special_id("<|end_of_msg|>"),
    ]  # fmt: skip


def chat_shaper(tokenizer, *stops):
    return AnswerShaper(
        ChatParser(tokenizer, thinking=True),
        stop_ids=[special_id("<|end_of_msg|>")],
        stop_texts=StopTexts(stops),
        is_chat=True,
    )


def test_stop_text_is_looked_for_in_the_visible_answer_only(tmp_path):
    shaped = chat_shaper(chat_tokenizer(tmp_path), "stop")
    chunk = shaped.push(answer_of("I stop here", "so stop there"))
    assert chunk.deltas == (ReasoningDelta("I stop here"), TextDelta("so "))
    assert (chunk.text, shaped.matched) == ("", "stop")


def test_text_held_back_comes_before_what_follows_it(tmp_path):
    tokenizer = chat_tokenizer(tmp_path)
    ids = answer_of("x", "so st")
    shaped = chat_shaper(tokenizer, "stop")
    chunks = [shaped.push([token]) for token in ids]
    chunks = [chunk for chunk in (*chunks, shaped.finish()) if chunk is not None]
    deltas = [delta for chunk in chunks for delta in chunk.deltas]
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "so st"
    assert [token for chunk in chunks for token in chunk.token_ids] == ids
