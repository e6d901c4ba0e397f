"""Structured output through the helpers of the real clients, against a real server.

The schemas are so narrow that even the smallest model gives a valid object; the tests check that the client gets it.
"""

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from pagewire.tools.servers import Server

REASON = "make test-clients installs it"
anthropic: Any = pytest.importorskip("anthropic", reason=REASON)
instructor: Any = pytest.importorskip("instructor", reason=REASON)
langchain: Any = pytest.importorskip("langchain_openai", reason=REASON)
pydantic_ai: Any = pytest.importorskip("pydantic_ai", reason=REASON)
from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

# Their warnings do not concern us. They leave connections to the garbage collector, which runs after every test.
pytestmark = [pytest.mark.e2e, pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
MODEL = "pagewire-demo"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    """A city and what is known of it."""

    name: Literal["Paris", "Rome", "Oslo"]
    is_capital: bool


@pytest.fixture(autouse=True)
def collect_garbage() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_parses_a_response_format(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=City, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, City) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, response_format=City, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_openai_parses_a_forced_tool_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(City)],
        tool_choice={"type": "function", "function": {"name": "City"}},
        temperature=1,
        seed=1,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert isinstance(call.function.parsed_arguments, City)


def test_openai_gets_a_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_format={"type": "json_object"}, temperature=1, seed=1, max_tokens=400
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


def test_openai_parses_a_text_format_of_responses(client: openai.OpenAI) -> None:
    response = client.responses.parse(model=MODEL, input=QUESTION, text_format=City, temperature=0)
    assert isinstance(response.output_parsed, City)
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=City, temperature=0) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_anthropic_gets_the_input_of_a_forced_tool(server: Server) -> None:
    tool = {"name": "city", "input_schema": City.model_json_schema()}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model=MODEL,
            max_tokens=100,
            messages=QUESTION,
            tools=[tool],
            tool_choice={"type": "tool", "name": "city"},
        )
    (block,) = message.content
    assert block.type == "tool_use" and City.model_validate(block.input)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_gets_an_object(client: openai.OpenAI, mode: str) -> None:
    structured = instructor.from_openai(client, mode=instructor.Mode[mode])
    city = structured.chat.completions.create(
        model=MODEL, messages=QUESTION, response_model=City, max_retries=0, temperature=0
    )
    assert isinstance(city, City)


class Palette(BaseModel):
    """Colours, each of them once."""

    colours: Annotated[set[Literal["red", "blue"]], Field(max_length=3)]
    shades: Annotated[dict[Literal["dark", "light"], bool], Field(default_factory=dict)]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_gets_a_set_and_a_dict(client: openai.OpenAI, mode: str) -> None:
    """The schema has uniqueItems and propertyNames, and omits additionalProperties for the object."""
    schema = Palette.model_json_schema()["properties"]
    assert schema["colours"]["uniqueItems"] and "enum" in schema["shades"]["propertyNames"]
    structured = instructor.from_openai(client, mode=instructor.Mode[mode])
    palette = structured.chat.completions.create(
        model=MODEL, messages=QUESTION, response_model=Palette, max_retries=0, temperature=1, seed=1
    )
    assert isinstance(palette, Palette) and palette.shades.keys() <= {"dark", "light"}


def test_an_unenforceable_schema_is_refused_only_where_it_is_required(client: openai.OpenAI) -> None:
    """The error names the field. A tool with such a schema may be offered."""
    schema: Any = {"type": "object", "properties": {"city": {"not": {}}}}
    tools: Any = [
        openai.pydantic_function_tool(City),
        {"type": "function", "function": {"name": "odd", "parameters": schema}},
    ]
    format: Any = {"type": "json_schema", "json_schema": {"name": "odd", "schema": schema}}
    for fields, param in (
        ({"tools": tools, "tool_choice": "required"}, "tools[1].function.parameters"),
        ({"response_format": format}, "response_format.json_schema.schema"),
        ({"tools": tools[:1], "response_format": format}, "response_format.json_schema.schema"),
    ):
        with pytest.raises(openai.BadRequestError, match=r"The JSON schema in .* cannot be enforced: .*not") as caught:
            client.chat.completions.create(model=MODEL, messages=QUESTION, **fields)
        assert caught.value.param == param
    format["json_schema"]["schema"] = City.model_json_schema()
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_format=format, tools=tools[1:], temperature=0
    )
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            model=MODEL,
            input="hi",
            tools=[{"type": "web_search"}, {"type": "function", "name": "odd", "parameters": schema, "strict": False}],
            tool_choice="required",
        )
    assert caught.value.param == "tools[1].parameters"


def test_an_object_has_no_additional_properties(client: openai.OpenAI) -> None:
    """Pydantic omits additionalProperties from schemas, and its models accept properties that a model invents."""
    format: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}
    for seed in range(5):
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, response_format=format, temperature=1.5, seed=seed
        )
        assert json.loads(answer.choices[0].message.content or "").keys() == {"name", "is_capital"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_an_object(server: Server, method: str) -> None:
    model = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0)
    structured = model.with_structured_output(City, method=method, strict=True)
    assert isinstance(structured.invoke("What is the capital of France?"), City)


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_pydantic_ai_gets_an_object(server: Server, output: str) -> None:
    async def scenario() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
            agent = pydantic_ai.Agent(
                model, output_type=getattr(pydantic_ai, output)(City), model_settings={"temperature": 0}
            )
            return (await agent.run("What is the capital of France?")).output

    assert isinstance(asyncio.run(scenario()), City)
