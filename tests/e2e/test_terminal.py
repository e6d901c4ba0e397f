"""The commands as a user types them, with a running server and with one that they start."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from terminals import Terminal
from waiting import until

from pagewire.tools.servers import Server
from pagewire.version import __version__

pytestmark = pytest.mark.e2e


def pagewire(folder: Path, *words: str, typed: str = "", timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PAGEWIRE_API_KEY"}
    return subprocess.run(
        [sys.executable, "-m", "pagewire", *words],
        input=typed,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=folder,
        env=environment,
        check=False,
    )


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*words: str) -> Terminal:
        opened.append(Terminal(tmp_path, *words))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def test_chat_keeps_the_history(server: Server, tmp_path: Path) -> None:
    typed = "My name is Maya\nWhat is my name?\n/new\nCount from 1 to 5\n/exit\n"
    result = pagewire(tmp_path, "chat", "--url", server.url, typed=typed)
    answers = result.stdout.splitlines()
    assert result.returncode == 0 and len(answers) == 3, result.stdout + result.stderr
    assert "Maya" in answers[1] and answers[2] == "1, 2, 3, 4, 5"


def test_complete_reads_its_prompt_from_an_argument_or_standard_input(server: Server, tmp_path: Path) -> None:
    prompt = "<|im_start|>user\nSpell cat<|im_end|>\n<|im_start|>assistant\n"
    given = pagewire(tmp_path, "complete", prompt, "--url", server.url)
    piped = pagewire(tmp_path, "complete", "--url", server.url, typed=prompt)
    assert given.returncode == 0 and given.stdout.strip() and given.stdout == piped.stdout


@pytest.mark.long
def test_chat_starts_a_server_and_ends_it(tmp_path: Path) -> None:
    result = pagewire(
        tmp_path, "chat", str(Path(__file__).resolve().parents[2] / "demo_model"), typed="Count from 1 to 5\n"
    )
    assert result.returncode == 0 and result.stdout.strip() == "1, 2, 3, 4, 5", result.stderr
    left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert not left


def test_an_unreachable_server_gives_one_sentence(tmp_path: Path) -> None:
    result = pagewire(tmp_path, "chat", "--url", "http://127.0.0.1:9", typed="hi\n")
    assert result.returncode == 1 and result.stderr.startswith("pagewire: No server answers at http://127.0.0.1:9")


def test_a_missing_model_folder_gives_one_sentence(tmp_path: Path) -> None:
    result = pagewire(tmp_path, "complete", "x", "--model", "./nowhere")
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == "pagewire: There is no folder ./nowhere."


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["serve"],
        ["chat"],
        ["complete"],
        ["tokenize"],
        ["run-batch"],
        ["top"],
        ["doctor"],
        ["replay"],
        ["completion"],
    ],
)
def test_help_begins_with_the_usage(tmp_path: Path, words: list[str]) -> None:
    result = pagewire(tmp_path, *words, "--help")
    assert result.returncode == 0 and result.stdout.startswith("usage: pagewire") and result.stderr == ""


def test_no_command_is_an_error_and_the_version_is_printed(tmp_path: Path) -> None:
    assert pagewire(tmp_path).returncode == 2
    assert pagewire(tmp_path, "--version").stdout == f"pagewire {__version__}\n"


def test_chat_commands_in_a_terminal(server: Server, terminal: Callable[..., Terminal]) -> None:
    talk = terminal("chat", "--url", server.url)
    talk.expect("/help lists the commands")
    talk.expect("> ")
    talk.type("Count from 1 to 5\n")
    talk.expect("1, 2, 3, 4, 5")
    talk.expect("s to the first")
    talk.type("/retry\n")
    talk.expect("1, 2, 3, 4, 5")
    talk.expect("> ")
    talk.type("/set max_tokens 3\n")
    talk.expect(", max_tokens 3")
    talk.expect("> ")
    talk.type("\x03")
    talk.type("\n")  # readline may have just begun to wait; then it handles the signal at the next key
    talk.expect("(Ctrl-D quits)")
    talk.type('"""Count from\n')
    talk.expect("… ")
    talk.type('1 to 5"""\n')
    talk.expect("(3 tokens")
    talk.type("/nonsense\n")
    talk.expect("forget the conversation")
    talk.expect("> ")
    talk.type("\x04")
    assert talk.wait() == 0


def test_an_answer_can_be_interrupted(server: Server, terminal: Callable[..., Terminal]) -> None:
    talk = terminal("chat", "--url", server.url, "--max-tokens", "8000")
    talk.expect("> ")
    talk.type("/set ignore_eos true\n")
    talk.expect("ignore_eos true")
    talk.expect("> ")
    for _ in range(5):  # on a busy machine the answer may end before the signal comes
        talk.type("/new\nCount from 1 to 5\n")
        talk.expect("1, 2")
        talk.type("\x03")
        talk.type("\n")  # as above
        if (shown := talk.expect("(interrupted)", "(Ctrl-D quits)")) == "(interrupted)":
            break
    assert shown == "(interrupted)"
    talk.type("/set ignore_eos\n/set max_tokens 30\nCount from 1 to 3\n")
    talk.expect("1, 2, 3")
    talk.type("/exit\n")
    assert talk.wait() == 0


def test_a_conversation_is_saved(server: Server, tmp_path: Path) -> None:
    result = pagewire(
        tmp_path, "chat", "--url", server.url, "--system", "Be brief.", typed="Count from 1 to 3\n/save talk.json\n"
    )
    assert result.returncode == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert saved[2]["content"] == result.stdout.strip()


def test_top_shows_the_metrics_of_the_server(server: Server, tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    pagewire(tmp_path, "complete", "1, 2, 3,", "--url", server.url)
    once = pagewire(tmp_path, "top", "--once", "--interval", "0.2", "--url", server.url)
    assert once.returncode == 0 and "\x1b" not in once.stdout
    for text in (
        "pagewire-demo",
        "running",
        "waiting",
        "KV cache",
        "generated",
        "time to first token",
        "ended: length",
    ):
        assert text in once.stdout, once.stdout
    screen = terminal("top", "--interval", "0.2", "--url", server.url)
    screen.expect("\x1b[?1049h")  # the alternate screen
    screen.expect("KV cache")
    screen.expect("KV cache")  # redrawn
    screen.type("q")
    assert screen.wait() == 0
    screen.expect("\x1b[?1049l")
    assert screen.settings_now() == screen.settings


@pytest.mark.long
def test_top_waits_for_a_stopped_server(start: Callable[..., Server], terminal: Callable[..., Terminal]) -> None:
    server = start().wait_ready()
    screen = terminal("top", "--interval", "0.2", "--url", server.url)
    screen.expect("KV cache")
    server.stop()
    screen.expect("No server answers")
    screen.type("\x03")
    assert screen.wait() == 0


def ask(server: Server, body: dict[str, object]) -> Any:
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def batch_line(custom_id: str, number: int, **body: Any) -> str:
    messages = [{"role": "user", "content": f"Count from 1 to {number}"}]
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "pagewire-demo", "messages": messages, "temperature": 0, **body},
        }
    )


def test_run_batch_answers_all_requests_and_continues_a_partial_output(server: Server, tmp_path: Path) -> None:
    numbers = {f"count-{number}": number for number in range(2, 18)}
    lines = [batch_line(custom_id, number) for custom_id, number in numbers.items()]
    refused = batch_line("refused", 3, temperature=9)
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, refused]) + "\n")
    words = ("run-batch", "in.jsonl", "out.jsonl", "--url", server.url, "--concurrency", "4")
    first = pagewire(tmp_path, *words)
    assert first.returncode == 0 and "17/17" in first.stderr, first.stderr

    whole = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(whole[:7]) + whole[7][:20])  # as if it had been killed
    again = pagewire(tmp_path, *words)
    assert again.returncode == 0 and "continuing: 7 of 17" in again.stderr
    assert (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)[:7] == whole[:7]

    answers = {}
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        answer = json.loads(line)
        assert answer["custom_id"] not in answers
        answers[answer["custom_id"]] = answer
    assert answers.keys() == numbers.keys() | {"refused"}
    assert (
        answers["refused"]["response"]["status_code"] == 400 and "temperature" in answers["refused"]["error"]["message"]
    )
    for custom_id, number in numbers.items():
        answer = answers[custom_id]
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert (
            answer["response"]["body"]["choices"] == ask(server, json.loads(batch_line("", number))["body"])["choices"]
        )
    assert pagewire(tmp_path, *words).stderr == "all 17 requests are answered in out.jsonl\n"


@pytest.mark.long
def test_a_killed_run_batch_continues_without_loss(server: Server, tmp_path: Path) -> None:
    lines = [batch_line(f"{i}", 18, max_tokens=200, seed=i, ignore_eos=True) for i in range(60)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = ("run-batch", "in.jsonl", "out.jsonl", "--url", server.url, "--concurrency", "2")
    process = subprocess.Popen(
        [sys.executable, "-m", "pagewire", *words], cwd=tmp_path, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    while not (tmp_path / "out.jsonl").exists() or (tmp_path / "out.jsonl").read_bytes().count(b"\n") < 5:
        assert process.poll() is None
    process.kill()
    process.wait()
    result = pagewire(tmp_path, *words)
    assert result.returncode == 0 and "continuing" in result.stderr, result.stderr
    ids = [json.loads(line)["custom_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(ids, key=int) == [str(i) for i in range(60)]


def test_run_batch_can_be_interrupted(server: Server, tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    lines = [batch_line(f"{i}", 18, max_tokens=2000, ignore_eos=True) for i in range(50)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    run = terminal("run-batch", "in.jsonl", "out.jsonl", "--url", server.url, "--concurrency", "2")
    run.expect("0/50")
    run.type("\x03")
    run.expect("run the command again to continue")
    assert run.wait() == 130
    until(lambda: server.metric("pagewire:num_requests_running") == 0, "the running requests end", 60)


def test_tokenize_prints_the_prompt_ids_of_the_server(server: Server, tmp_path: Path) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Spell cat"}],
        "max_tokens": 1,
        "return_token_ids": True,
    }
    ids = ask(server, body)["prompt_token_ids"]
    result = pagewire(tmp_path, "tokenize", "--chat", "--format", "json", "Spell cat")
    assert json.loads(result.stdout) == {"tokens": ids, "count": len(ids)}
    text = pagewire(tmp_path, "tokenize", "--decode", *map(str, ids)).stdout
    assert "Spell cat" in text and text.startswith("<|im_start|>")
    assert pagewire(tmp_path, "tokenize", "--format", "count", typed=text[:-1]).stdout == f"{len(ids)}\n"
    wrong = pagewire(tmp_path, "tokenize", "--decode", "1", "70000")
    assert wrong.returncode == 2 and "'70000' is not a token id" in wrong.stderr


@pytest.mark.parametrize("flags", [(), ("--dtype", "bfloat16"), ("--quantization", "int8")], ids=str)
@pytest.mark.long
def test_explain_prints_the_memory_that_the_start_announces(
    start: Callable[..., Server], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    more = ("--kv-cache-memory", "32M", "--max-num-seqs", "7", *flags)
    result = pagewire(tmp_path, "serve", "--explain", *more)
    assert result.returncode == 0, result.stderr
    (plan,) = [line.strip() for line in result.stdout.splitlines() if line.strip().startswith("weights ")]
    log = start(*more).wait_ready().log
    until(lambda: "weights " in log.read_text(), "the start announces the weights", 60)
    (announced,) = [line.strip() for line in log.read_text().splitlines() if line.strip().startswith("weights ")]
    assert plan == announced
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("max-num-seqs")]
    assert line.split() == ["max-num-seqs", "7", "--max-num-seqs"]


def test_serve_reads_a_config_file(start: Callable[..., Server], tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('served_model_name = "from-the-file"\nmax-model-len = "1k"\nport = 1\n')
    server = start("--config", str(file)).wait_ready()
    assert json.loads(server.get("/v1/models"))["data"][0]["id"] == "from-the-file"
    assert "context 1,024 tokens" in server.announced()


@pytest.mark.long
def test_doctor_finds_no_problem_or_prints_each_one(server: Server, tmp_path: Path) -> None:
    healthy = pagewire(tmp_path, "doctor", "--port", "0")
    assert healthy.returncode == 0 and healthy.stdout.endswith("no problems found\n"), healthy.stdout
    (tmp_path / "model").mkdir()
    faulty = pagewire(tmp_path, "doctor", "./model", "--port", str(server.port))
    assert faulty.returncode == 1 and faulty.stdout.endswith("2 problems found\n"), faulty.stdout
    assert f"cannot listen on 127.0.0.1:{server.port}" in faulty.stdout and "choose another --port" in faulty.stdout
    assert "has no config.json" in faulty.stdout
