from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.request import EngineRequest, FinishReason, TokenOutput
from kvferry.engine.tokenizer import DetokenizerStream
from kvferry.protocol.ids import RequestId
from kvferry.protocol.kv_report import KvReport
from kvferry.server.generation import Choice, ChoiceOptions, Delta, StopMatcher

NAME = RequestId("r")
REPORT = KvReport(arrived_s=0.0)


def feed_all(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What a search in the text so far finds, a piece of one character at a time."""
    for end in range(1, len(text) + 1):
        found = [(text.find(stop, 0, end), -len(stop), stop) for stop in stops]
        found = [match for match in found if match[0] >= 0]
        if found:
            position, _, stop = min(found)
            return text[:position], stop
    return text, None


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_character_by_character_the_first_completed_stop_counts(
    text: str, stops: list[str]
) -> None:
    assert feed_all(StopMatcher(tuple(stops)), list(text)) == first_stop(text, stops)


@given(
    st.lists(st.text(alphabet="abc", max_size=6), max_size=8),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_whatever_the_pieces_nothing_of_a_stop_is_shown(
    pieces: list[str], stops: list[str]
) -> None:
    text = "".join(pieces)
    shown, stop = feed_all(StopMatcher(tuple(stops)), pieces)
    if stop is None:
        assert shown == text
        assert not any(other in text for other in stops)
    else:
        assert text.startswith(shown + stop)
        assert not any(other in shown for other in stops)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    matcher = StopMatcher(("abc", "bd"))
    assert matcher.feed("xa") == ("x", None)
    assert matcher.feed("b") == ("", None)
    assert matcher.feed("d") == ("a", "bd")


def test_of_two_that_begin_together_the_longer_counts() -> None:
    assert StopMatcher(("ab", "abc")).feed("xabcd") == ("x", "abc")


def test_the_stop_is_shown_where_asked_for() -> None:
    matcher = StopMatcher(("END",), include_stop=True)
    assert matcher.feed("1 E") == ("1 ", None)
    assert matcher.feed("ND 2") == ("END", "END")


def assembler(**options: object) -> Choice:
    request = EngineRequest(request_id=NAME, prompt_token_ids=())
    stream = DetokenizerStream(lambda ids: bytes(ids).decode(errors="replace"))
    return Choice(0, request, stream, ChoiceOptions(**options))  # type: ignore[arg-type]


def token(text: str, reason: FinishReason | None = None) -> TokenOutput:
    report = None if reason is None else REPORT
    return TokenOutput(request_id=NAME, token_id=ord(text), finish_reason=reason, report=report)


def run(choice: Choice, outputs: list[TokenOutput]) -> list[Delta]:
    return [delta for delta in map(choice.feed, outputs) if delta is not None]


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    choice = assembler(stop_strings=("a",), min_tokens=2)
    deltas = run(choice, [token("a"), token("a"), token("b"), token("a")])
    assert "".join(delta.text for delta in deltas) == "aab"
    assert deltas[-1].stop_reason == "a"


def test_nothing_is_added_after_the_end() -> None:
    choice = assembler(stop_strings=("b",))
    run(choice, [token("a"), token("b")])
    assert choice.is_finished
    assert choice.needs_abort
    assert run(choice, [token("c"), token("d", FinishReason.LENGTH)]) == []


def test_with_a_report_wanted_the_end_waits_for_it() -> None:
    choice = assembler(stop_strings=("b",), wants_report=True)
    (first,) = run(choice, [token("b")])
    assert first.finish_reason is None
    assert not choice.is_finished
    aborted = TokenOutput(request_id=NAME, finish_reason=FinishReason.ABORT, report=REPORT)
    (last,) = run(choice, [token("c"), aborted])
    assert (last.finish_reason, last.stop_reason, last.report) == (FinishReason.STOP, "b", REPORT)
    assert last.num_tokens == 1


def test_a_stop_string_in_the_last_token_needs_no_second_end() -> None:
    choice = assembler(stop_strings=("b",), wants_report=True)
    (last,) = run(choice, [token("b", FinishReason.LENGTH)])
    assert (last.finish_reason, last.stop_reason, last.report) == (FinishReason.STOP, "b", REPORT)


def test_an_end_without_a_token_is_an_end() -> None:
    choice = assembler()
    end = TokenOutput(request_id=NAME, finish_reason=FinishReason.LENGTH)
    (first, last) = run(choice, [token("a"), end])
    assert (first.text, last.text, last.token_ids) == ("a", "", ())
    assert last.finish_reason is FinishReason.LENGTH


def test_a_models_end_token_is_no_stop_reason() -> None:
    choice = assembler(stop_token_ids=frozenset({7}))
    end = TokenOutput(request_id=NAME, token_id=2, finish_reason=FinishReason.STOP, stop_token_id=2)
    (last,) = run(choice, [end])
    assert (last.text, last.stop_reason, last.token_ids) == ("", None, (2,))
