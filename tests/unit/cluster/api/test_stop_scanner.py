import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.stop_scanner import StopScanner, StopTexts

# Few letters, so that stop texts overlap, nest and nearly match.
letters = st.text(alphabet="ab\u20ac", max_size=24)
stop_texts = st.lists(st.text(alphabet="ab\u20ac", min_size=1, max_size=6), max_size=5)


def scanner(*texts, is_included=False):
    return StopScanner(StopTexts(texts), is_included=is_included)


def naive(text, stops, *, is_included=False):
    """What may be shown of a whole text, and the stop text that ended it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if is_included else end - len(longest)], longest
    return text, None


def test_text_without_stop_texts_is_shown_at_once():
    scan = scanner()
    assert (scan.push("abc"), scan.num_held) == ("abc", 0)


def test_answer_ends_where_the_stop_text_begins():
    scan = scanner("STOP")
    assert scan.push("so far STOP and more") == "so far "
    assert scan.matched == "STOP"


def test_nothing_is_shown_after_a_stop_text():
    scan = scanner("x")
    scan.push("ax")
    assert (scan.push("bc"), scan.flush()) == ("", "")


def test_stop_text_is_shown_when_it_is_included():
    assert scanner("ST", is_included=True).push("a ST b") == "a ST"


def test_start_of_a_stop_text_waits_and_is_shown_once_it_is_none():
    scan = scanner("STOP")
    assert [scan.push(piece) for piece in ("aS", "TO", "x")] == ["a", "", "STOx"]


def test_only_the_longest_end_that_may_become_a_stop_text_is_held_back():
    scan = scanner("aab")
    assert scan.push("aaa") == "a"
    assert (scan.push("b"), scan.matched) == ("", "aab")


def test_what_is_held_back_at_the_end_is_shown():
    scan = scanner("STOP")
    assert scan.push("aST") + scan.flush() == "aST"


@pytest.mark.parametrize("texts", [("bc", "abc"), ("abc", "bc")], ids=["short first", "long first"])
def test_of_stop_texts_that_are_complete_together_the_longest_counts(texts):
    scan = scanner(*texts)
    assert (scan.push("xabc"), scan.matched) == ("x", "abc")


def test_stop_text_that_is_complete_first_counts():
    scan = scanner("abcd", "bc")
    assert (scan.push("abcd"), scan.matched) == ("a", "bc")


def test_stop_text_is_plain_text_where_the_answer_may_not_stop():
    scan = scanner("ab")
    assert scan.push("ab", can_stop=False) == "ab"
    assert (scan.push("ab"), scan.matched) == ("", "ab")


def test_stop_text_that_begins_where_the_answer_may_not_stop_ends_it_later():
    scan = scanner("abc")
    scan.push("ab", can_stop=False)
    assert (scan.push("c"), scan.matched) == ("", "abc")


@settings(deadline=None, max_examples=1000)
@given(
    text=letters,
    stops=stop_texts,
    cuts=st.lists(st.integers(0, 24), max_size=8),
    is_included=st.booleans(),
)
def test_any_split_shows_what_the_slow_reference_shows(text, stops, cuts, is_included):
    scan = scanner(*stops, is_included=is_included)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    shown = ""
    expected, matched = naive(text, stops, is_included=is_included)
    for start, end in itertools.pairwise(bounds):
        shown += scan.push(text[start:end])
        assert expected.startswith(shown)
    assert (shown + scan.flush(), scan.matched) == (expected, matched)


@settings(deadline=None, max_examples=300)
@given(text=letters, stops=stop_texts)
def test_exactly_what_may_still_become_a_stop_text_is_held_back(text, stops):
    scan = scanner(*stops)
    scan.push(text)
    longest = max(
        (n for n in range(len(text) + 1) for stop in stops
         if 0 < n < len(stop) and text.endswith(stop[:n])),
        default=0,
    )  # fmt: skip
    assert scan.num_held == (0 if scan.matched else longest)


def test_many_long_stop_texts_cost_no_more_per_character():
    # Quadratic work would take minutes here.
    scan = scanner(*("a" * length + "b" for length in range(1, 100)))
    text = "a" * 200_000
    assert scan.push(text) + scan.flush() == text
