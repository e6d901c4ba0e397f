"""The web page in a real browser, against a real server.

Needs tests/e2e/requirements-browser.txt and an installed Chromium; `make test-browser` installs the former.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

import pagewire
from pagewire.tools.servers import Server

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
Open = Callable[..., Page]
expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[Open]:
    """Opens the page in a fresh profile. Errors, console messages and requests to other hosts fail the test."""
    contexts, complaints = [], []
    allowed: list[str] = []

    def open_one(url: str = server.url, path: str = "/", *, may_complain_of: str = "", **options: Any) -> Page:
        allowed.extend([may_complain_of] if may_complain_of else [])
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 860}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on(
            "request",
            lambda request: complaints.append(f"foreign: {request.url}") if not request.url.startswith(url) else None,
        )
        page.goto(url + path)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert [text for text in complaints if not any(word in text for word in allowed)] == []


def ask(page: Page, text: str) -> Locator:
    """Sends a question with the keyboard. Returns the message with the complete answer."""
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    expect(page.locator("#send")).to_have_text("Send", timeout=60_000)
    return page.locator(".message").last


def test_a_conversation_is_answered_and_kept_over_a_reload(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#model")).to_have_value("pagewire-demo")
    expect(page.locator("#context")).to_have_text("8,192 tokens of context")
    expect(page.locator("#version")).to_have_text(pagewire.__version__)
    expect(page.locator("#status")).to_contain_text("Ready")
    expect(page.locator("#prompt")).to_be_focused()
    page.locator("#field-temperature").fill("0")
    answer = ask(page, "What is 17 + 25?")
    expect(answer.locator(".text")).to_contain_text("42")
    expect(answer.locator(".figures")).to_have_text(re.compile(r"^\d+ tokens · first after \d+ ms ·.* prompt \d+"))
    expect(ask(page, "Count from 1 to 5").locator(".text")).to_contain_text("1, 2, 3, 4, 5")
    expect(page.locator(".message")).to_have_count(4)

    page.reload()
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator("#field-temperature")).to_have_value("0")

    page.locator("#new").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()


def test_the_request_has_the_values_of_the_form(open_page: Open) -> None:
    page = open_page()
    page.locator("#system").fill("Be brief.")
    page.get_by_label("Temperature, as a slider").fill("0.5")
    page.get_by_text("More", exact=True).click()
    page.locator("#field-top_k").fill("20")
    page.locator("#stop").fill("4\n\\n\\n")
    page.locator("#extra").fill('{"min_p": 0.1, "max_tokens": 64}')
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Count from 1 to 9")
    assert sent.value.post_data_json == {
        "model": "pagewire-demo",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count from 1 to 9"}],
        "temperature": 0.5,
        "top_k": 20,
        "stop": ["4", "\n\n"],
        "min_p": 0.1,
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.locator("#extra").fill("{")
    page.locator("#prompt").fill("This must not be sent")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#extra")).to_be_focused()
    expect(page.locator(".message")).to_have_count(2)


def test_an_answer_is_streamed_and_can_be_stopped(open_page: Open, server: Server) -> None:
    page = open_page()
    page.get_by_text("More", exact=True).click()
    page.locator("#extra").fill('{"ignore_eos": true, "max_tokens": 8000}')
    page.locator("#prompt").fill("Count from 1 to 500")
    page.locator("#prompt").press("Enter")
    text = page.locator(".message.growing .text")
    expect(text).to_contain_text("1, 2")
    early = text.inner_text()
    expect(text).not_to_have_text(early)
    assert text.inner_text().startswith(early[: len(early) // 2])
    expect(page.locator("#running")).to_have_text("1")
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".figures").last).to_contain_text("stopped")
    expect(page.locator("#running")).to_have_text("0")
    assert server.metric("pagewire:num_requests_running") == 0


def test_tokens_show_their_alternatives(open_page: Open) -> None:
    page = open_page()
    page.locator("#field-temperature").fill("0")
    page.get_by_label("Colour tokens by probability").check()
    answer = ask(page, "What is 2 + 3?")
    tokens = answer.locator(".token:not(.silent)")
    assert "5" in "".join(tokens.all_text_contents())
    assert answer.locator(".token.silent").all_text_contents() == ["<|im_end|>"]
    card = page.locator("#alternatives")
    expect(card).to_be_hidden()
    tokens.first.hover()
    expect(card.locator("div")).to_have_count(5)
    expect(card.locator(".chosen span").first).to_have_text(tokens.first.inner_text())
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(card.locator("meter").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    page.keyboard.press("c")
    expect(answer.locator(".token")).to_have_count(0)
    expect(answer.locator(".text")).to_contain_text("5")


def test_characters_of_several_tokens_are_shown_whole(open_page: Open) -> None:
    page = open_page()
    page.locator("#field-temperature").fill("0")
    page.get_by_label("Colour tokens by probability").check()
    answer = ask(page, "Say é 你 🙂")
    text = "".join(answer.locator(".token:not(.silent)").all_text_contents())
    page.keyboard.press("Control+Home")
    page.get_by_label("Colour tokens by probability").uncheck()
    page.get_by_label("Format Markdown").uncheck()
    assert text == answer.locator(".text").text_content() and "\ufffd" not in text


def test_questions_can_be_edited_and_answers_regenerated(open_page: Open) -> None:
    page = open_page()
    page.locator("#field-temperature").fill("0")
    ask(page, "What is 1 + 1?")
    page.locator("#prompt").press("ArrowUp")
    expect(page.locator("#prompt")).to_have_value("What is 1 + 1?")
    expect(page.locator(".message")).to_have_count(0)
    first = ask(page, "What is 4 + 4?").locator(".text").inner_text()
    assert "8" in first
    page.locator(".message").last.locator(".again").click()
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".message .text").last).to_have_text(first)


def test_tool_calls_are_shown(open_page: Open) -> None:
    page = open_page()
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather of a city", "parameters": parameters}
    page.get_by_text("More", exact=True).click()
    page.locator("#extra").fill(json.dumps({"temperature": 0, "tools": [{"type": "function", "function": function}]}))
    answer = ask(page, "What is the weather in Paris?")
    expect(answer.locator(".calls")).to_have_text(re.compile(r'^get_weather\(\{"city": ?"Paris"\}\)$'))
    expect(answer.locator(".figures")).to_contain_text("tool call")


def test_reasoning_is_shown_once_for_either_field_name(open_page: Open) -> None:
    page = open_page()
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning": "Both ", "reasoning_content": "Both "},
        {"reasoning_content": "names."},
        {"content": "Yes."},
    ]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    lines = [": keep-alive", *(f"data: {json.dumps(event)}" for event in events), "data: [DONE]", ""]
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body="\r\n\r\n".join(lines)),
    )
    answer = ask(page, "Is it?")
    expect(answer.locator(".thoughts")).to_have_text("Both names.")
    expect(answer.locator(".text")).to_have_text("Yes.")

    cut = "\n\n".join(lines[:-2]) + "\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut))
    answer = ask(page, "And if the connection closes?")
    expect(answer.locator(".text")).to_have_text("Yes.")
    expect(answer.locator(".error")).to_have_text("The connection closed before the answer ended.")


def test_a_new_conversation_stops_the_answer(open_page: Open, server: Server) -> None:
    page = open_page()
    page.get_by_text("More", exact=True).click()
    page.locator("#extra").fill('{"ignore_eos": true, "max_tokens": 8000}')
    page.locator("#prompt").fill("Count from 1 to 500")
    page.locator("#prompt").press("Enter")
    expect(page.locator(".message.growing .text")).not_to_be_empty()
    page.locator("#new").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#send")).to_have_text("Send")
    until(lambda: server.metric("pagewire:num_requests_running") == 0, "the row of the request is free")


def test_the_error_message_of_the_server_is_shown(open_page: Open) -> None:
    page = open_page(may_complain_of="400")
    page.get_by_text("More", exact=True).click()
    page.locator("#extra").fill('{"temperature": 9}')
    answer = ask(page, "Hello")
    expect(answer.locator(".error")).to_contain_text("temperature")
    page.locator("#extra").fill("{}")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello again")
    body = sent.value.post_data_json
    assert body is not None and [message["role"] for message in body["messages"]] == ["user", "user"]


def test_html_of_a_model_is_escaped(open_page: Open) -> None:
    page = open_page()
    marks = "<img src=x onerror=alert(1)> **bold** `a<b` [l](javascript:alert(1)) [k](https://example.org/)\n"
    marks += "```js\n<script>alert(1)</script>\n```\n# Title\n3. three\n4. four\n- one\n  more\n"
    html = page.evaluate(
        """async (text) => {
            const { render } = await import("./page/markdown.js");
            const node = document.createElement("div");
            for (let end = 1; end <= text.length; end++) render(node, text.slice(0, end)); // as it streams
            const whole = document.createElement("div");
            render(whole, text);
            if (node.innerHTML !== whole.innerHTML) throw new Error(node.innerHTML);
            return whole.innerHTML;
        }""",
        marks,
    )
    assert html == (
        "<p>&lt;img src=x onerror=alert(1)&gt; <strong>bold</strong> <code>a&lt;b</code> [l](javascript:alert(1)) "
        '<a href="https://example.org/" rel="noopener noreferrer" target="_blank">k</a></p>'
        '<pre data-language="js" tabindex="0"><code>&lt;script&gt;alert(1)&lt;/script&gt;</code></pre>'
        '<h3>Title</h3><ol start="3"><li>three</li><li>four</li></ol><ul><li>one\nmore</li></ul>'
    )


def test_quantiles_equal_those_of_prometheus(open_page: Open) -> None:
    page = open_page()
    found = page.evaluate(
        """async () => {
            const { quantile, sample, rate } = await import("./page/metrics.js");
            const before = [[1, 5], [2, 5], [Infinity, 5]];
            const after = [[1, 5], [2, 15], [Infinity, 15]];
            const tail = [[1, 5], [2, 5], [Infinity, 6]];
            const looks = [[0, 7], [2, 27]].map(([at, n]) =>
                sample(`# HELP x\\npagewire:generation_tokens_total{model_name="a\\\\"}b"} ${n}.0\\nother 3`, at));
            return [quantile(before, after, 0.5), quantile(before, before, 0.5), quantile(before, tail, 0.5),
                    rate(looks[0], looks[1], "outputTokens")];
        }"""
    )
    assert found == [1.5, None, 2, 10]


def test_the_live_view_has_a_bar_for_each_stage(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#stages")).to_be_hidden()
    seconds = {"busy": 4, "plan": 1, "input": 2, "ids": 1}

    def answer(route: Any) -> None:
        for state in seconds:
            seconds[state] += 4 if state == "busy" else 2 if state == "input" else 1
        lines = [
            f'pagewire:stage_seconds_total{{model_name="m",stage="{stage}",state="{state}"}} {value if stage else 9}'
            for stage in (0, 1)
            for state, value in seconds.items()
        ]
        route.fulfill(body="\n".join([*lines, 'pagewire:pipeline_bubble_ratio{model_name="m"} 0.75', ""]))

    page.route("**/metrics", answer)
    expect(page.locator("#stages")).to_be_visible()
    expect(page.locator("#bubbles")).to_have_text("75 %")
    expect(page.locator("#stages dt")).to_have_text(["Stage 0", "Stage 1"])
    expect(page.locator("#stages dd")).to_have_text(["idle", "50 %"])
    assert page.locator("#stages .stage .busy").nth(1).evaluate("part => part.style.width") == "50%"


def test_the_live_view_shows_what_the_machine_does(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#memory")).to_be_visible()
    expect(page.locator("#memory div.weights dd")).to_have_text(re.compile(r"^\d\.\d MB$"))
    expect(page.locator("#machine")).to_be_visible()
    expect(page.locator("#cpus")).to_have_text(re.compile(r"^\d+\.\d\d$"))
    expect(page.locator("#classes")).to_be_hidden()
    counts = {"num": 0, "met": 0}

    def answer(route: Any) -> None:
        counts.update(num=counts["num"] + 4, met=counts["met"] + 3)
        lines = [
            'worker_memory_bytes{model_name="m",rank="0",kind="weights"} 3221225472',
            'worker_memory_bytes{model_name="m",rank="1",kind="weights"} 3221225472',
            'worker_memory_bytes{model_name="m",rank="0",kind="kv_used"} 2147483648',
            'worker_memory_bytes{model_name="m",rank="0",kind="kv_cached"} 0',
            'process_cpu_seconds_total{model_name="m",process="worker"} 7',
            'memory_roof_ratio{model_name="m",rank="0"} 0.5',
            'memory_roof_ratio{model_name="m",rank="1"} 0.7',
            'memory_bandwidth_bytes_per_second{model_name="m",rank="0",source="nominal"} 2.5e12',
            'gpu_utilization_ratio{model_name="m",rank="0"} 0.83',
            'gpu_power_watts{model_name="m",rank="0"} 250.6',
            'gpu_is_slowed{model_name="m",rank="0"} 1',
            'gpu_xid_errors_total{model_name="m",rank="0"} 2',
            'gpu_cache_usage_perc{model_name="m"} 0.5',
            f'slo_observations_total{{model_name="m",latency_class="chat",target="itl"}} {counts["num"]}',
            f'slo_attained_total{{model_name="m",latency_class="chat",target="itl"}} {counts["met"]}',
            'slo_observations_total{model_name="m",latency_class="batch",target="ttft"} 0',
        ]
        route.fulfill(body="\n".join([*(f"pagewire:{line}" for line in lines), ""]))

    page.route("**/metrics", answer)
    expect(page.locator("#memory-all")).to_have_text("8.0 GB")
    expect(page.locator("#memory dt")).to_have_text(["Weights", "KV in use"])
    expect(page.locator("#memory dd")).to_have_text(["6.0 GB", "2.0 GB"])
    assert page.locator("#memory .parts i").first.evaluate("part => part.style.width") == "75%"
    expect(page.locator("#roof")).to_have_text("60 % of 2500 GB/s")
    expect(page.locator("#gpus dt")).to_have_text(["GPU 0"])
    expect(page.locator("#gpus dd")).to_have_text(["83 % · 251 W · slowed · 2 errors"])
    expect(page.locator("#classes dt")).to_have_text(["chat", "batch"])
    expect(page.locator("#classes dd")).to_have_text(["75 %", "idle"])


def test_the_live_view_shows_the_metrics_of_the_engine(open_page: Open, server: Server) -> None:
    page = open_page()
    expect(page.locator("#running")).to_have_text("0")
    before = server.metric("pagewire:generation_tokens_total")
    figures = ask(page, "Count from 1 to 9").locator(".figures").inner_text()
    number = int(figures.split(" tokens")[0])
    until(lambda: server.metric("pagewire:generation_tokens_total") >= before + number, "the engine reports")
    after = server.metric("pagewire:generation_tokens_total")
    expect(page.locator("#tokens-out")).to_have_text(f"{after:,.0f}")
    expect(page.locator("#first-p50")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    expect(page.locator("#step-p50")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    expect(page.locator("#inter-p99")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    expect(page.locator("#speed-chart path.line.output")).to_have_attribute("d", re.compile(r"^M[\d.,L-]+$"))


@pytest.mark.parametrize("options", [{"color_scheme": "dark"}, {"viewport": {"width": 360, "height": 640}}], ids=str)
def test_one_of_several_models_is_chosen_and_seen_to_be_loaded(
    start: Callable[..., Server], open_page: Open, tmp_path: Path, options: dict[str, object]
) -> None:
    file = tmp_path / "models.toml"
    entries = [("demo", "first"), ("demo-hybrid", "second")]
    lines = '[[models]]\nmodel = "{}"\nserved_model_name = "{}"\nkv_cache_memory = "32M"\n'
    file.write_text("".join(lines.format(*entry) for entry in entries))
    page = open_page(start("--models", str(file)).wait_ready("/health").url, **options)
    entry = page.locator("#model option")
    expect(entry).to_have_text(["first · unloaded", "second · unloaded"])
    page.locator("#model").select_option("second")
    ask(page, "Count from 1 to 3")
    expect(entry).to_have_text(["first · unloaded", "second · loaded"])
    expect(page.locator("#model")).to_have_value("second")
    expect(page).to_have_title("second · pagewire")
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth"), "the page is too wide"


def test_an_api_key_is_requested_and_kept_only_for_the_tab(start: Callable[..., Server], open_page: Open) -> None:
    server = start("--api-key", "let-me-in").wait_ready()
    page = open_page(server.url, may_complain_of="401")
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    page.locator("#key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-refused")).to_be_visible()
    page.locator("#key").fill("let-me-in")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#model")).to_have_value("pagewire-demo")
    expect(page.locator("#status")).to_contain_text("Ready")
    page.locator("#field-temperature").fill("0")
    expect(ask(page, "What is 3 + 4?").locator(".text")).to_contain_text("7")
    stored = page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
    assert "let-me-in" not in stored[0] and "let-me-in" in stored[1]
    page.reload()
    expect(page.locator("#model")).to_have_value("pagewire-demo")
    expect(dialog).to_be_hidden()


def test_a_stopped_server_is_reported(start: Callable[..., Server], open_page: Open) -> None:
    server = start().wait_ready()
    page = open_page(server.url, may_complain_of="ERR_CONNECTION_")
    expect(page.locator("#status")).to_contain_text("Ready")
    server.stop()
    expect(page.locator("#status")).to_contain_text("The server does not answer.")
    expect(ask(page, "Hello").locator(".error")).to_have_text("The server does not answer.")


def test_the_theme_follows_the_system_and_can_be_switched(open_page: Open) -> None:
    def lightness(page: Page) -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    page = open_page(color_scheme="dark")
    assert lightness(page) < 60
    page.locator("#theme").click()
    assert lightness(page) > 200
    page.reload()
    assert lightness(page) > 200
    page.locator("#theme").click()
    assert lightness(page) < 60
    assert lightness(open_page(color_scheme="light")) > 200


def test_a_small_screen_shows_one_view_at_a_time(open_page: Open) -> None:
    page = open_page(viewport={"width": 360, "height": 640}, has_touch=True)
    views = {"Chat": "#chat", "Parameters": "#parameters", "Engine": "#engine"}
    for name, shown in views.items():
        page.get_by_role("button", name=name, exact=True).click()
        for section in views.values():
            expect(page.locator(section)).to_be_visible(visible=section == shown)
        assert page.evaluate("document.documentElement.scrollWidth") == 360, "the page is too wide"
    page.keyboard.press("1")
    expect(page.locator("#chat")).to_be_visible()


def test_every_control_is_reached_with_the_keyboard(open_page: Open) -> None:
    page = open_page()
    page.keyboard.press("Escape")
    page.locator("#prompt").blur()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    page.keyboard.press("/")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("n/?c1")  # shortcut keys are plain letters in the prompt
    expect(page.locator("#prompt")).to_have_value("n/?c1")
    page.locator("#prompt").fill("")
    reached = set()
    page.locator(".skip").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    wanted = {"model", "theme", "help-button", "system", "field-temperature", "field-seed", "curl", "prompt", "send"}
    assert wanted <= reached


def test_every_control_has_an_accessible_name(open_page: Open) -> None:
    page = open_page()
    ask(page, "Hello")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, meter, dialog, svg[role=img]")]
            .filter((node) => !(node.labels?.length || node.getAttribute("aria-label")
                || node.getAttribute("aria-labelledby") || node.textContent.trim()))
            .map((node) => node.outerHTML)"""
    )
    assert nameless == []


def test_the_api_page_lists_operations_and_sends_requests(open_page: Open, server: Server) -> None:
    page = open_page(path="/docs")
    expect(page.locator("#version")).to_have_text(pagewire.__version__)
    expect(page.locator(".operation")).to_have_count(server.get("/openapi.json").count('"operationId"'))
    chat = page.locator("#post_v1_chat_completions")
    chat.locator("summary").first.click()
    expect(chat.get_by_text("temperature", exact=True)).to_be_visible()
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".received")).to_contain_text('"content": "1, 2, 3, 4, 5"')
    chat.locator(".sent").fill('{"messages": [{"role": "user", "content": "Count from 1 to 3"}], "stream": true}')
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".received")).to_contain_text("data: [DONE]")
    chat.locator(".fields summary", has_text="messages").click()
    expect(chat.locator(".fields").get_by_text("tool_call_id", exact=True).first).to_be_visible()

    page.goto(f"{server.url}/docs#get_v1_models_id")
    page.reload()
    model = page.locator("#get_v1_models_id")
    model.locator("input").fill("pagewire-demo")
    model.get_by_role("button", name="Send").click()
    expect(model.locator(".received")).to_contain_text('"max_model_len": 8192')
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_api_page_shows_error_responses(open_page: Open) -> None:
    page = open_page(path="/docs#post_v1_completions", may_complain_of="400")
    text = page.locator("#post_v1_completions")
    text.locator(".sent").fill('{"prompt": [999999]}')
    text.get_by_role("button", name="Send").click()
    expect(text.locator(".received")).to_have_text(re.compile(r"^400 .*token id"))
