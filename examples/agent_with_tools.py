"""An agent loop over HTTP: the model asks for tools, this program runs them and sends the results back.

    pagewire serve                                   # in another terminal
    python examples/agent_with_tools.py "What is the weather in Paris?"

It needs `pip install openai` and works with any server that speaks OpenAI's API.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import openai

WEATHER = {"Paris": "sunny", "Oslo": "snowing"}


def get_weather(city: str) -> str:
    """What a real program would ask a weather service for."""
    return WEATHER.get(city, "cloudy")


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


TOOLS: dict[str, Callable[..., object]] = {"get_weather": get_weather, "add": add}


def described(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A tool as the API wants it. parameters: name → JSON type."""
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema, "strict": True},
    }


DESCRIPTIONS = [
    described("get_weather", "Get the weather of a city", city="string"),
    described("add", "Add two numbers", a="integer", b="integer"),
]


def run(client: openai.OpenAI, model: str, question: str, *, max_turns: int = 5) -> list[dict[str, Any]]:
    """The conversation: the question, each call with its result, and the last answer. Raises RuntimeError if the model
    goes on calling tools after `max_turns`."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(max_turns):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,  # type: ignore[arg-type]  # plain dicts are what the API documents
            tools=DESCRIPTIONS,  # type: ignore[arg-type]
            temperature=0,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return messages
        for call in message.tool_calls:
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            result = TOOLS[call.function.name](**arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"result": result})})
    raise RuntimeError(f"the model still calls tools after {max_turns} turns")


def main() -> None:
    """Prints the conversation."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("question")
    flags.add_argument("--url", default="http://127.0.0.1:8000/v1", help="(default: %(default)s)")
    flags.add_argument("--api-key", default="none")
    given = flags.parse_args()
    with openai.OpenAI(base_url=given.url, api_key=given.api_key) as client:
        for message in run(client, client.models.list().data[0].id, given.question):
            calls = [call["function"] for call in message.get("tool_calls", ())]
            print(f"{message['role']}: {message.get('content') or calls}")


if __name__ == "__main__":
    main()
