from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from firsttoken.cli.conversation import AnswerFailed, LocalSource, Message, RemoteSource
from firsttoken.cli.main import main
from firsttoken.cli.terminal import HELP, Chat, pipe_reader
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError, EngineDead, InvalidRequest
from firsttoken.engine import launch
from firsttoken.engine.stub import Fault


class FakeSource:
    """Answers with pieces, or raises what it finds among them; keeps what it was asked."""

    model = "fake"
    completion_tokens: int | None = 3

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.asked: list[list[Message]] = []
        self.closed = 0

    def stream(self, messages: list[Message]) -> Iterator[str]:
        self.asked.append(list(messages))
        try:
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.closed += 1

    def close(self) -> None: ...


def talk(source: FakeSource, *turns: str | BaseException, interactive: bool = False, system: str | None = None) -> str:
    """The console's text after these turns."""
    out = io.StringIO()
    chat = Chat(source, Console(file=out, soft_wrap=True), system=system, interactive=interactive)
    left = iter(turns)

    def read() -> str:
        turn = next(left, EOFError())
        if isinstance(turn, BaseException):
            raise turn
        return turn

    assert chat.run(read) == 0
    return out.getvalue()


def roles(messages: list[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_answers_are_streamed_and_remembered() -> None:
    source = FakeSource(["Pa", "", "ris"], ["Rome"])
    assert talk(source, "France?", "", "Italy?", system="Be brief.") == "Paris\nRome\n"
    assert roles(source.asked[0]) == [("system", "Be brief."), ("user", "France?")]
    assert roles(source.asked[1])[1:] == [("user", "France?"), ("assistant", "Paris"), ("user", "Italy?")]


def test_reset_keeps_only_the_system_message() -> None:
    source = FakeSource(["a"], ["b"])
    talk(source, "one", "/reset", "two", system="S")
    assert roles(source.asked[1]) == [("system", "S"), ("user", "two")]


def test_exit_leaves() -> None:
    source = FakeSource(["a"])
    talk(source, "/exit", "never asked")
    assert source.asked == []


def test_history_and_unknown_commands() -> None:
    source = FakeSource(["a"])
    text = talk(source, "hi", "/history", "/fly", interactive=True)
    assert "user: hi\nassistant: a\n" in text
    assert "unknown command '/fly'" in text
    assert len(source.asked) == 1


def test_figures_are_shown_to_a_person_only() -> None:
    assert "first token after" in talk(FakeSource(["a", "b"]), "hi", interactive=True)
    assert talk(FakeSource(["a", "b"]), "hi") == "ab\n"


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    source = FakeSource(["Once upon", KeyboardInterrupt()], ["more"])
    text = talk(source, "a story", "go on", interactive=True)
    assert "stopped" in text
    assert source.closed == 2
    assert roles(source.asked[1]) == [("user", "a story"), ("assistant", "Once upon"), ("user", "go on")]


def test_ctrl_c_at_the_prompt_does_not_leave() -> None:
    source = FakeSource(["a"])
    assert "/exit" in talk(source, KeyboardInterrupt(), "hi", interactive=True)
    assert len(source.asked) == 1


def test_a_failed_turn_is_told_and_forgotten_at_a_terminal() -> None:
    source = FakeSource([InvalidRequest("the prompt is too long")], ["b"])
    text = talk(source, "long", "short", interactive=True)
    assert "error: the prompt is too long" in text
    assert roles(source.asked[1]) == [("user", "short")]


def test_a_failed_turn_ends_a_pipe() -> None:
    with pytest.raises(AnswerFailed):
        talk(FakeSource([AnswerFailed("no")]), "hi")


def test_a_dead_engine_ends_the_talk() -> None:
    with pytest.raises(EngineDead):
        talk(FakeSource([EngineDead("gone")]), "hi", interactive=True)


def test_a_models_text_cannot_drive_the_terminal() -> None:
    text = talk(FakeSource(["a\x1b[2J\x1b]0;title\x07b\rc\x9b1m\td [red]x[/red] :smile:"]), "hi")
    assert text == "a[2J]0;titlebc1m\td [red]x[/red] :smile:\n"


def test_pipe_reader_ends_with_the_stream() -> None:
    read = pipe_reader(io.StringIO("one\ntwo"))
    assert [read(), read()] == ["one\n", "two"]
    with pytest.raises(EOFError):
        read()


# ---------------------------------------------------------------- the command, with an engine here


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_chat_from_a_pipe(stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(monkeypatch, "hi\nyou\n")
    assert main(["chat", "--max-tokens", "100", "--threads", "1"]) == 0
    assert capsys.readouterr().out == "USER:HI\n\nUSER:HI\nASSISTANT:USER:HI\n\nUSER:YOU\n\n"
    assert stub.args == [EngineArgs(threads=1)]
    assert not stub.engines[0].alive()


def test_chat_with_an_engine_that_dies(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.script = lambda request: [65, Fault("out of memory", fatal=True)]
    pipe(monkeypatch, "hi\n")
    assert main(["chat"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("A")
    assert "out of memory" in shown.err


def test_chat_whose_engine_cannot_start(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stub.options = {"fail_start": "no such file"}
    assert main(["chat"]) == 1
    assert "no such file" in capsys.readouterr().err


def test_closing_a_local_stream_aborts_the_request(stub: Any) -> None:
    stub.options = {"step_s": 0.002}
    stub.script = lambda request: stub.say("x" * 3000)
    args = EngineArgs()
    source = LocalSource(args, {"max_tokens": 3000}, launch.start_process(args))
    try:
        stream = source.stream([{"role": "user", "content": "hi"}])
        assert next(stream).strip("x") == ""  # what piled up comes as one delta
        stream.close()  # type: ignore[attr-defined]
        # The engine is free at once for the next one.
        stub.script = lambda request: stub.say("ok")
        assert "".join(source.stream([{"role": "user", "content": "again"}])) == "ok"
        assert source.completion_tokens == 3  # the end token counts, as in every usage figure
    finally:
        source.close()
    # Had the first one not been aborted, it would have run on for six seconds.
    assert len(stub.requests) == 2
    assert not stub.engines[0].alive()


def test_a_model_that_cannot_chat_is_refused_before_it_is_loaded(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stub.chat_template = None
    assert main(["chat", "m"]) == 2
    assert "m has no chat template: chat needs a model with a tokenizer" in capsys.readouterr().err
    stub.tokenizer = None
    assert main(["chat", "m"]) == 2
    assert "m has no tokenizer and no chat template: chat needs" in capsys.readouterr().err
    assert not stub.args


def test_random_weights_cannot_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def launch(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("firsttoken.frontend.async_llm.AsyncLLM.launch", launch)
    assert main(["chat", "random:llama-3.2-1b"]) == 2
    assert "needs a model with a tokenizer and a chat template" in capsys.readouterr().err


def test_the_greeting_fits_100_columns() -> None:
    assert len(HELP) <= 100


@pytest.mark.parametrize("flags", [["--api-key", "k"], ["--url", "http://x", "--threads", "2"], ["--url", "ftp://x"]])
def test_flags_that_do_not_go_together(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *flags]) == 2
    assert flags[-2] in capsys.readouterr().err


# ---------------------------------------------------------------- the command, with a server elsewhere

CHUNK = '{"choices": [{"index": 0, "delta": {"content": "%s"}}]}'


@pytest.fixture
def server() -> Iterator[Callable[..., tuple[str, list[dict]]]]:
    """A server that answers with these SSE lines (or this status), and what it was asked."""
    running: list[ThreadingHTTPServer] = []

    def start(events: list[str], *, status: int = 200, body: str = "") -> tuple[str, list[dict]]:
        asked: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                self._reply(200, '{"data": [{"id": "m"}]}')

            def do_POST(self) -> None:
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                asked[-1]["key"] = self.headers.get("Authorization")
                self._reply(status, body or "".join(f"data: {event}\n\n" for event in events))

            def _reply(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

        httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        running.append(httpd)
        return f"http://127.0.0.1:{httpd.server_address[1]}", asked

    yield start
    for httpd in running:
        httpd.shutdown()
        httpd.server_close()


USAGE = '{"choices": [], "usage": {"completion_tokens": 2}}'


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_chat_with_a_server(
    suffix: str, server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, asked = server([CHUNK % "Pa", CHUNK % "ris", USAGE, "[DONE]"])
    pipe(monkeypatch, "France?\n")
    assert main(["chat", "--url", url + suffix, "--api-key", "k", "--temperature", "0", "--system", "S"]) == 0
    assert capsys.readouterr().out == "Paris\n"
    assert asked[0]["model"] == "m"
    assert asked[0]["stream"] is True
    assert asked[0]["temperature"] == 0
    assert asked[0]["key"] == "Bearer k"
    assert roles(asked[0]["messages"]) == [("system", "S"), ("user", "France?")]


def test_remote_counts_tokens(server: Any) -> None:
    url, _ = server([CHUNK % "a", USAGE, "[DONE]"])
    source = RemoteSource(url, {}, model="other")
    assert source.model == "other"
    assert "".join(source.stream([])) == "a"
    assert source.completion_tokens == 2


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        ({"events": [], "status": 400, "body": '{"error": {"message": "bad temperature"}}'}, "bad temperature"),
        ({"events": [], "status": 500, "body": "<html>"}, "HTTP 500"),
        (
            {"events": [], "status": 401, "body": '{"error": {"message": "No"}}'},
            "No; give the right key with --api-key",
        ),
        ({"events": [CHUNK % "a", '{"error": {"message": "engine died"}}']}, "engine died"),
        ({"events": [CHUNK % "a"]}, "before"),
    ],
)
def test_a_servers_refusal_is_told(reply: dict[str, Any], word: str, server: Any) -> None:
    url, _ = server(**reply)
    with pytest.raises(AnswerFailed, match=word):
        "".join(RemoteSource(url, {}).stream([]))


def test_no_server() -> None:
    with pytest.raises(AnswerFailed, match="cannot reach"):
        RemoteSource("http://127.0.0.1:9", {})


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "http://", ""])
def test_a_bad_url(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        RemoteSource(url, {})
