import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.answer_shaper import AnswerShaper, PlainReader
from cluster.api.answers import Chunk
from model.tokenizer import IncrementalDetokenizer, Tokenizer

TOKENIZER = Tokenizer({bytes([value]): value for value in range(256)}, {})
EURO = tuple("\u20ac".encode())
STOP = 256


def shaper(*, resume_offset=0, stop_ids=(), has_tokenizer=True):
    return AnswerShaper(
        PlainReader(IncrementalDetokenizer(TOKENIZER)) if has_tokenizer else None,
        stop_ids=stop_ids,
        resume_offset=resume_offset,
    )


def test_text_waits_for_the_rest_of_a_character():
    shaped = shaper()
    assert shaped.push(EURO[:2]) == Chunk(EURO[:2], "")
    assert shaped.push(EURO[2:]) == Chunk(EURO[2:], "\u20ac")
    assert shaped.finish() is None


def test_incomplete_character_at_the_end_is_replaced():
    shaped = shaper()
    shaped.push(EURO[:2])
    assert shaped.finish() == Chunk((), "\ufffd")


def test_stop_token_is_among_the_ids_and_not_in_the_text():
    shaped = shaper(stop_ids=[ord("!")])
    assert shaped.push([ord("a"), ord("!")]) == Chunk((97, 33), "a")


def test_without_tokenizer_text_is_empty():
    shaped = shaper(has_tokenizer=False)
    assert shaped.push([1, 2]) == Chunk((1, 2), "")
    assert shaped.finish() is None


def test_resumed_tokens_are_not_sent():
    shaped = shaper(resume_offset=2)
    assert shaped.push([97]) is None
    assert shaped.push([98, 99]) == Chunk((99,), "c")


def test_resuming_inside_a_character_gives_it_with_its_last_token():
    shaped = shaper(resume_offset=2)
    assert shaped.push(EURO) == Chunk(EURO[2:], "\u20ac")


def test_resuming_beyond_the_answer_sends_nothing():
    shaped = shaper(resume_offset=5)
    assert shaped.push(EURO[:2]) is None
    assert shaped.finish() is None


@settings(deadline=None)
@given(
    text=st.text(min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    offset=st.integers(0, 80),
)
def test_resumed_answer_continues_the_unbroken_one_wherever_it_is_cut(text, cuts, offset):
    ids = TOKENIZER.encode(text)
    offset = min(offset, len(ids))
    head = shaper()
    before = head.push(ids[:offset]) if offset else None
    resumed = shaper(resume_offset=offset)
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    chunks = [resumed.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    chunks = [chunk for chunk in (*chunks, resumed.finish()) if chunk is not None]
    assert [token for chunk in chunks for token in chunk.token_ids] == ids[offset:]
    assert (before.text if before else "") + "".join(chunk.text for chunk in chunks) == text
