"""Agent frameworks with one tool: `python frameworks.py URL NAME` asks and prints the answer. They have a virtual
environment of their own, because their requirements exclude each other's and ours."""

import asyncio
import sys
from collections.abc import Callable

QUESTION = "Agent, how many lines has notes.txt?"
MODEL = "pagewire-demo"


def num_lines(path: str) -> str:
    """Counts the lines of a file.

    Args:
        path: the file
    """
    return f"3 {path}"


def openai_agents(url: str) -> None:
    """By both of OpenAI's APIs."""
    from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from agents import set_tracing_disabled as disable_tracing
    from openai import AsyncOpenAI

    disable_tracing(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

    async def ask() -> None:
        for model in (OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)):
            agent = Agent(name="counter", instructions="Use the tool.", tools=[function_tool(num_lines)], model=model)
            print((await Runner.run(agent, QUESTION)).final_output)

    asyncio.run(ask())


def langgraph(url: str) -> None:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(base_url=f"{url}/v1", api_key=lambda: "none", model=MODEL), [num_lines])
    print(agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)


def smolagents(url: str) -> None:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=f"{url}/v1", api_key="none")
    print(ToolCallingAgent(tools=[tool(num_lines)], model=model, verbosity_level=0).run(f"smol{QUESTION}"))


FRAMEWORKS: dict[str, Callable[[str], None]] = {
    "openai-agents": openai_agents,
    "langgraph": langgraph,
    "smolagents": smolagents,
}

if __name__ == "__main__":
    FRAMEWORKS[sys.argv[2]](sys.argv[1])
