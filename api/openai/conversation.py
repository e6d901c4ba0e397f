"""A conversation in the shape of chat's messages, put together from the items and blocks of other APIs.

The chat template knows one shape only. There, what an assistant said and the calls that it made are one message.
"""

from collections.abc import Sequence

import msgspec

ChatMessageDict = dict[str, object]


class Conversation:
    """Grows by one part at a time."""

    def __init__(self, earlier: bytes = b"[]") -> None:
        """`earlier`: what `json` once gave."""
        self._messages: list[ChatMessageDict] = msgspec.json.decode(earlier, type=list[ChatMessageDict])
        self._reasoning: list[str] = []  # belongs to the assistant's next message

    @property
    def last_role(self) -> str | None:
        """Who spoke last."""
        return str(self._messages[-1]["role"]) if self._messages else None

    @property
    def ends_with_call(self) -> bool:
        """Whether the last message calls tools."""
        return bool(self._messages) and "tool_calls" in self._messages[-1]

    def add_text(self, role: str, texts: Sequence[str]) -> None:
        """A message of one or several parts."""
        content: object = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
        self._add({"role": role, "content": content})

    def add_reasoning(self, text: str) -> None:
        """What the assistant thought before its next message. Without one it is dropped."""
        self._reasoning.append(text)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """A call by the assistant; `arguments` is JSON."""
        if self.last_role != "assistant" or self._reasoning:
            self._add({"role": "assistant", "content": ""})
        calls = self._messages[-1].setdefault("tool_calls", [])
        assert isinstance(calls, list), calls
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_result(self, call_id: str, texts: Sequence[str]) -> None:
        """What a call gave."""
        self._add({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})

    def json(self) -> bytes:
        """A JSON array of messages."""
        return msgspec.json.encode(self._messages)

    def _add(self, message: ChatMessageDict) -> None:
        if self._reasoning and message["role"] == "assistant":
            message["reasoning_content"] = "\n".join(self._reasoning)
            self._reasoning.clear()
        self._messages.append(message)
