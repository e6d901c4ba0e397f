"""Builds chat messages, the only shape that chat templates know, from the items and blocks of other APIs.

An assistant's text and the calls after it are one message.
"""

from collections.abc import Sequence

import msgspec

ChatMessageDict = dict[str, object]


class Conversation:
    """A conversation that is built part by part."""

    def __init__(self, earlier: bytes = b"[]") -> None:
        """`earlier`: the `json` of the conversation so far."""
        self._messages: list[ChatMessageDict] = msgspec.json.decode(earlier, type=list[ChatMessageDict])
        self._reasoning: list[str] = []  # belongs to the assistant's next message

    @property
    def last_role(self) -> str | None:
        """The role of the last message; None without messages."""
        return str(self._messages[-1]["role"]) if self._messages else None

    @property
    def ends_with_call(self) -> bool:
        """Whether the last message calls tools."""
        return bool(self._messages) and "tool_calls" in self._messages[-1]

    def add_text(self, role: str, texts: Sequence[str]) -> None:
        """Adds a message with one or several text parts."""
        content: object = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
        self._add({"role": role, "content": content})

    def add_reasoning(self, text: str) -> None:
        """Adds the reasoning before the assistant's next message; without such a message it is dropped."""
        self._reasoning.append(text)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Adds a call by the assistant; `arguments` is JSON."""
        if self.last_role != "assistant" or self._reasoning:
            self._add({"role": "assistant", "content": ""})
        calls = self._messages[-1].setdefault("tool_calls", [])
        assert isinstance(calls, list), calls
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_result(self, call_id: str, texts: Sequence[str]) -> None:
        """Adds the result of a call."""
        self._add({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})

    def json(self) -> bytes:
        """The messages as a JSON array."""
        return msgspec.json.encode(self._messages)

    def _add(self, message: ChatMessageDict) -> None:
        if self._reasoning and message["role"] == "assistant":
            message["reasoning_content"] = "\n".join(self._reasoning)
            self._reasoning.clear()
        self._messages.append(message)
