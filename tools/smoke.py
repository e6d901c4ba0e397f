"""Asks a running server a few questions with the real `openai` client; `.ci/run` uses it.

`python -m pagewire.tools.smoke --url http://127.0.0.1:8000` prints the answers and fails if one is wrong.
"""

import argparse
import sys
import time
import urllib.error
import urllib.request

_DEADLINE_S = 120.0


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if all answers are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address (default: %(default)s)")
    url = parser.parse_args(argv).url
    deadline = time.monotonic() + _DEADLINE_S
    while not _healthy(url):
        if time.monotonic() > deadline:
            print(f"{url} did not answer within {_DEADLINE_S:g} s", file=sys.stderr)
            return 1
        time.sleep(0.1)

    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    for question, expected in (
        ("What is 3 + 4?", "7"),
        ("Who are you?", "demo model"),
        ("Count from 1 to 5", "1, 2, 3, 4, 5"),
    ):
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], temperature=0, stream=True
        )
        answer = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        print(f"{question} → {answer}")
        if expected not in answer:
            print(f"expected {expected!r} in the answer", file=sys.stderr)
            return 1
    return 0


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())
