"""Translates requests of Anthropic's Messages API into chat requests. Fields without a counterpart are refused by name
if ignoring them would change the answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ...config.config import EngineConfig
from ...errors import RequestError
from ..http.http_error import HttpError, as_http_error, unsupported
from ..openai.conversation import Conversation
from ..openai.translate import set_thinking
from ..openai.types import ChatRequest
from ..output.parsers.registry import find_family
from ..output.shapes import GenerationRequest, ResponseFormat
from .types import Block, CountTokensRequest, MessagesRequest, Source

_REFUSED = (
    "compaction", "container", "mcp_servers", "thread",
    "use_beam_search", "return_tokens_as_token_ids",
)  # fmt: skip
_OWN = ("max_tokens", "stop", "user", "thinking_token_budget", "return_token_ids")  # translated, not copied
_OWN_NAMES = {
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "thinking_token_budget": "thinking.budget_tokens",
}
_SHARED = tuple(name for name in GenerationRequest.__struct_fields__ if name not in _OWN)


def chat_request(request: CountTokensRequest, config: EngineConfig) -> ChatRequest:
    """The request as a chat request. Raises HttpError."""
    for name in _REFUSED:
        if getattr(request, name):
            raise unsupported(name)
    _check_context_management(request)
    for name in ("prompt_logprobs", "kv_transfer_params", "cache_hit_threshold"):
        if getattr(request, name) is not None:
            raise unsupported(name)
    if request.n not in (None, 1):
        raise unsupported("n")
    if request.return_token_ids and not request.stream:
        raise unsupported("return_token_ids", "return_token_ids without stream is not supported.")
    conversation = _conversation(request)
    goes_on = conversation.last_role == "assistant"
    if goes_on and conversation.ends_with_call:
        at = f"messages[{len(request.messages) - 1}]"
        raise HttpError(400, f"{at} calls a tool, and no tool_result follows.", param=at)
    choice = request.tool_choice
    variables = dict(request.chat_template_kwargs or {})
    budget = request.thinking_token_budget
    if request.thinking is not None:
        family = find_family(config.tool_call_parser, config.reasoning_parser)
        if request.thinking.type == "enabled" and family.reasoning is not None:
            # Agents send a budget with every request; without known reasoning there is nothing to bound.
            budget = request.thinking.budget_tokens
        set_thinking(variables, request.thinking.type != "disabled")
    max_tokens, stop, user, resumed = None, request.stop, request.user, None
    if isinstance(request, MessagesRequest):
        max_tokens = request.max_tokens
        resumed = request.resume_token_ids
        stop = request.stop_sequences or stop
        user = request.metadata.user_id if request.metadata is not None and request.metadata.user_id else user
    return ChatRequest(
        **{name: getattr(request, name) for name in _SHARED},
        max_completion_tokens=max_tokens,
        stop=stop,
        user=user,
        thinking_token_budget=budget,
        messages=msgspec.Raw(conversation.json()),
        tools=msgspec.Raw(msgspec.json.encode(_tools(request))),
        tool_choice=_tool_choice(request),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        response_format=_response_format(request),
        reasoning_effort=request.output_config.effort if request.output_config is not None else None,
        chat_template_kwargs=variables,
        resume_token_ids=resumed,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )


@contextmanager
def in_terms_of_messages(config: EngineConfig) -> Iterator[None]:
    """Rewrites errors of chat and the engine for this API: with its field names, and with the sentence by which its
    clients recognize a prompt that is too long."""
    try:
        yield
    except (HttpError, RequestError) as error:
        refused = as_http_error(error)
        if refused.code == "context_length_exceeded":
            raise _too_long(refused.num_tokens, config.max_model_len) from None
        raise refused.with_name(_own_name) from None


def _too_long(num_tokens: int, max_model_len: int) -> HttpError:
    most = min(max_model_len, num_tokens - 1) if num_tokens else max_model_len  # a prompt leaves room for a token
    length = str(num_tokens) if num_tokens else f"more than {most}"  # 0: it was too long to be counted
    detail = f"prompt is too long: {length} tokens > {most} maximum"
    return HttpError(400, detail, code="context_length_exceeded", num_tokens=num_tokens)


def _own_name(param: str) -> str:
    if param.startswith("tools["):
        return param.replace(".function.parameters", ".input_schema").replace(".function.", ".")
    return _OWN_NAMES.get(param, param)


def _conversation(request: CountTokensRequest) -> Conversation:
    conversation = Conversation()
    if request.system:
        conversation.add_text("system", _texts(request.system, "system"))
    if not request.messages:
        raise HttpError(400, "messages must not be empty.", param="messages")
    for i, message in enumerate(request.messages):
        place = f"messages[{i}].content"
        if isinstance(message.content, str):
            conversation.add_text(message.role, [message.content])
        else:
            _add_blocks(conversation, message.role, message.content, place)
    return conversation


def _add_blocks(conversation: Conversation, role: str, blocks: Sequence[Block], place: str) -> None:
    """Adjacent texts become one message, and each tool result a message of its own."""
    texts: list[str] = []

    def end_texts() -> None:
        if texts:
            conversation.add_text(role, list(texts))
            texts.clear()

    for i, block in enumerate(blocks):
        match block:
            case Block(type="text", text=str(text)):
                texts.append(text)
            case Block(type="document") if role == "user":
                texts.append(_document(block, f"{place}[{i}]"))
            case Block(type="thinking", thinking=str(thinking)) if role == "assistant":
                end_texts()
                conversation.add_reasoning(thinking)
            case Block(type="redacted_thinking") if role == "assistant":
                pass  # only its author can read it
            case Block(type="tool_use", id=str(id), name=str(name)) if role == "assistant":
                end_texts()
                conversation.add_call(id, name, msgspec.json.encode(block.input or {}).decode())
            case Block(type="tool_result", tool_use_id=str(id)) if role == "user":
                end_texts()
                results = _texts(block.content or "", f"{place}[{i}].content")
                # Chat's messages have no field for errors.
                conversation.add_result(id, ["Error:", *results] if block.is_error else results)
            case _:
                raise _bad_block(block, f"{place}[{i}]", role)
    end_texts()


def _texts(content: str | Sequence[Block], place: str) -> list[str]:
    """Of a system prompt or a result of a tool; only results may contain documents."""
    if isinstance(content, str):
        return [content]
    texts = []
    for i, block in enumerate(content):
        if block.type == "document" and place != "system":
            texts.append(_document(block, f"{place}[{i}]"))
        elif block.type != "text" or block.text is None:
            raise _bad_block(block, f"{place}[{i}]", "")
        else:
            texts.append(block.text)
    return texts


def _document(block: Block, place: str) -> str:
    """The text that the model reads of a document. Raises HttpError 400 if it is no text."""
    if block.citations is not None and block.citations.enabled:
        raise unsupported(f"{place}.citations", f"{place}.citations: answers cite nothing.")
    match block.source:
        case Source(type="text", data=str(text)):
            pass
        case Source(type="content", content=str(text)):
            pass
        case Source(type="content", content=list(blocks)) if all(each.type == "text" for each in blocks):
            text = "\n".join(each.text or "" for each in blocks)
        case _:
            raise _bad_block(block, place, "user")
    head = "".join(f"{line}\n" for line in (block.title, block.context) if line)
    return f"<document>\n{head}{text}\n</document>\n"


def _bad_block(block: Block, place: str, role: str) -> HttpError:
    of = f" of role {role}" if role else ""
    detail = f"{place}: a block of type {block.type[:40]!r} with these fields is not supported in a message{of}."
    return unsupported(place, detail)


def _tools(request: CountTokensRequest) -> list[dict[str, object]]:
    tools: list[dict[str, object]] = []
    for i, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            param = f"tools[{i}].type"
            raise unsupported(param, f"{param} {tool.type[:40]!r} is not supported.")
        schema = tool.input_schema or {"type": "object", "properties": {}}
        function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(request: CountTokensRequest) -> str | dict[str, object] | None:
    if request.tool_choice is None:
        return None
    match request.tool_choice.type:
        case "any":
            return "required"
        case "tool":
            if not request.tool_choice.name:
                raise HttpError(400, "tool_choice.name is missing: name a tool.", param="tool_choice.name")
            return {"type": "function", "function": {"name": request.tool_choice.name}}
        case "auto" | "none" as word:
            return word


def _check_context_management(request: CountTokensRequest) -> None:
    """Ignores edits that only clear old blocks, because the answer is as good without them. Refuses others, such as a
    summary in place of the conversation, which would change what the client gets."""
    edits = request.context_management.edits if request.context_management is not None else None
    for i, edit in enumerate(edits or ()):
        if not edit.type.startswith("clear_"):
            param = f"context_management.edits[{i}].type"
            raise unsupported(param, f"{param} {edit.type[:40]!r} is not supported.")


def _response_format(request: CountTokensRequest) -> ResponseFormat | None:
    format = request.output_config.format if request.output_config is not None else None
    if format is not None and request.output_format is not None:
        raise HttpError(400, "output_config.format and output_format cannot both be given.", param="output_format")
    format = format or request.output_format
    return None if format is None else format.as_response_format()
