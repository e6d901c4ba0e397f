"""A model's chat template: turns a conversation in JSON into the model's prompt.

Owns the sandboxed jinja environment, which means what transformers' `apply_chat_template` means, and converts OpenAI's
message shapes into those that templates expect. Templates come from the model's folder or the operator, and from a
request only if the operator trusts requests. A template is foreign code, so it runs in the tokenizer process, the only
one that a bad template can hurt.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from ...errors import ConfigError, RequestError, prompt_too_long
from .template_files import read_templates
from .tokenizer import Tokenizer

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # the first is the one that templates read
_MAX_REASON = 500  # characters of a template's error message, which may quote a whole message
DEFAULT_MAX_CHARS = 1 << 25


class ChatBounds(NamedTuple):
    """How long a chat's prompt may become."""

    max_chars: int
    max_model_len: int  # tokens of the context, for the error message


_UNBOUNDED = ChatBounds(DEFAULT_MAX_CHARS, DEFAULT_MAX_CHARS)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Generator(jinja2.compiler.CodeGenerator):
    """Evaluates nothing while it compiles, so that the limits of requests bound all that a template computes."""

    def _output_child_to_const(
        self,
        node: jinja2.nodes.Expr,
        frame: jinja2.compiler.Frame,
        finalize: jinja2.compiler.CodeGenerator._FinalizeInfo,
    ) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for."""

    code_generator_class = _Generator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # see `_Generator`
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """The compiled template(s) of one model."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        bounds: ChatBounds = _UNBOUNDED,
    ) -> None:
        """`sources`: name → template. `tool_use` is used when there are tools, else `default`; without either, chat
        requests are refused. `special_tokens`: the template's variables `bos_token` and so on. Raises ConfigError if a
        template is not valid jinja."""
        environment = _Environment()
        self.source = sources.get("default")
        self._special_tokens = dict(special_tokens)
        self._bounds = bounds
        self._reserved = _RESERVED | environment.globals.keys() | special_tokens.keys()
        try:
            self._templates = {name: _Compiled(environment, source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The chat template is not valid jinja: {error.message} (line {error.lineno}).") from None
        except (RecursionError, MemoryError, SyntaxError, OverflowError):  # of Python's compiler, among others
            raise ConfigError("The chat template is nested too deeply, or too large.") from None

    def encode(
        self,
        tokenizer: Tokenizer,
        *,
        messages: bytes,
        tools: bytes = b"",
        template_kwargs: bytes = b"",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The prompt's ids. The arguments are the fields of `messages.ChatPrompt`. Raises RequestError
        ("invalid_request") if the template refuses the conversation or the JSON does not have the expected shape."""
        text = self.render(
            messages=messages,
            tools=tools,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            neutralize=tokenizer.neutralize,
        )
        return tokenizer.encode_rendered(text)

    def render(
        self,
        *,
        messages: bytes,
        tools: bytes = b"",
        template_kwargs: bytes = b"",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        neutralize: Callable[[str], str] = str,
    ) -> str:
        """The prompt's text. `neutralize` is applied to every string of the conversation."""
        try:
            return self._render(
                messages, tools, template_kwargs, add_generation_prompt, continue_final_message, neutralize
            )
        except RecursionError:
            raise RequestError("invalid_request", "The conversation is nested too deeply.") from None

    def _render(
        self,
        messages: bytes,
        tools: bytes,
        template_kwargs: bytes,
        add_generation_prompt: bool,
        continue_final_message: bool,
        neutralize: Callable[[str], str],
    ) -> str:
        conversation = _decode_list(messages, "messages")
        tool_list = _decode_list(tools, "tools") if tools else None
        variables = _decode_object(template_kwargs, "chat_template_kwargs") if template_kwargs else {}
        for name in variables.keys() & self._reserved:
            raise RequestError("invalid_request", f"chat_template_kwargs must not set {name!r}.")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "invalid_request", "continue_final_message and add_generation_prompt cannot both be true."
            )
        template = self._choose(bool(tool_list))
        conversation = [_map_strings(template.prepare(message), neutralize) for message in conversation]
        if continue_final_message:
            _tag_final_message(conversation)
        text = self._run(
            template.jinja,
            {
                **self._special_tokens,
                **{key: _map_strings(value, neutralize) for key, value in variables.items()},
                "messages": conversation,
                "tools": None if tool_list is None else _map_strings(tool_list, neutralize),
                "documents": _map_strings(variables.get("documents"), neutralize),
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _cut_at_tag(text) if continue_final_message else text

    def _choose(self, has_tools: bool) -> "_Compiled":
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        raise RequestError(
            "invalid_request", "This model has no chat template; use /v1/completions, or start with --chat-template."
        )

    def _run(self, template: jinja2.Template, variables: dict[str, object]) -> str:
        parts: list[str] = []
        num_chars = 0
        try:
            for part in template.generate(variables):
                num_chars += len(part)
                if num_chars > self._bounds.max_chars:
                    why = f"the chat has more than the {self._bounds.max_chars} characters that are encoded"
                    raise prompt_too_long(self._bounds.max_model_len, why)
                parts.append(part)
        except jinja2.TemplateError as error:
            sentence = " ".join((error.message or "no reason given").split())[:_MAX_REASON].rstrip(".")
            raise RequestError("invalid_request", f"The chat template refuses this conversation: {sentence}.") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            # Templates are written for well-formed chats; others make them fail with any of Python's errors.
            raise RequestError(
                "invalid_request", f"The chat template cannot handle this conversation ({type(error).__name__})."
            ) from None
        return "".join(parts)


class _Compiled:
    """One template, and the message shapes that it expects according to its source."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        tree = environment.parse(source)
        self.jinja = environment.from_string(source)
        self._takes_parts = _iterates_over_content(tree)
        self._takes_text = not self._takes_parts or any(
            test.name == "string" for test in tree.find_all(jinja2.nodes.Test)
        )
        self._knows_developer = "developer" in source

    def prepare(self, message: object) -> dict[str, object]:
        """A client's message in the shape that the template expects."""
        if not isinstance(message, dict):
            raise RequestError("invalid_request", "Each message must be an object.")
        prepared = dict(message)
        if prepared.get("role") == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        prepared["content"] = self._content(prepared.get("content"))
        calls = prepared.get("tool_calls")
        if isinstance(calls, list) and calls:
            prepared["tool_calls"] = [_with_object_arguments(call) for call in calls]
        else:
            prepared.pop("tool_calls", None)
        reasoning = next((prepared[key] for key in _REASONING_FIELDS if prepared.get(key) is not None), None)
        if reasoning is not None:
            prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
        return prepared

    def _content(self, content: object) -> object:
        if content is None:
            content = ""
        if isinstance(content, str):
            return content if self._takes_text else [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise RequestError("invalid_request", "A message's content must be a string or a list of parts.")
        texts = [_part_text(part) for part in content]
        return [{"type": "text", "text": text} for text in texts] if self._takes_parts else "\n".join(texts)


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            if isinstance(text := part.get(key), str):
                return text
    raise RequestError("invalid_request", "A content part must be of type text; this model takes nothing else.")


def _with_object_arguments(call: object) -> object:
    """OpenAI sends a call's arguments as a JSON string; templates expect the object."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Arguments that are not JSON, for instance because a length limit cut them, stay a string.
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
    return {**call, "function": {**function, "arguments": arguments}}


def _iterates_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template loops over a message's content, and so takes lists of parts."""
    names = {"content"}  # variables that hold a content, as in {% set content = message['content'] %}
    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node, names: set[str]) -> bool:
    match node:
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")) | jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Name(name=name):
            return name in names
        case jinja2.nodes.Filter(node=inner) if inner is not None:
            return _is_content(inner, names)
        case _:
            return False


def _map_strings(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return value


def _tag_final_message(conversation: list[object]) -> None:
    final = conversation[-1] if conversation else None
    content = final.get("content") if isinstance(final, dict) else None
    if isinstance(final, dict) and isinstance(content, str):
        final["content"] = content + _CONTINUE_TAG
    elif isinstance(content, list) and content:
        content[-1]["text"] += _CONTINUE_TAG
    else:
        raise RequestError("invalid_request", "continue_final_message needs a final message with text.")


def _cut_at_tag(text: str) -> str:
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise RequestError("invalid_request", "The chat template does not show the final message, so it cannot go on.")
    # A template that trims messages has removed the tag's last space, and would have removed those before the tag.
    return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()


def _decode_list(data: bytes, name: str) -> list[object]:
    try:
        return msgspec.json.decode(data, type=list[object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise RequestError("invalid_request", f"{name} must be a JSON array.") from None


def _decode_object(data: bytes, name: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(data, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise RequestError("invalid_request", f"{name} must be a JSON object.") from None


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_chat_template(
    folder: Path,
    tokenizer: Tokenizer,
    operators: str | None = None,
    *,
    bounds: ChatBounds = _UNBOUNDED,
) -> ChatTemplate:
    """The chat template of the checkpoint in `folder`, or the `operators` instead (see
    `read_templates`). Without one, the result refuses
    chat requests. Raises ConfigError if it is damaged."""
    return ChatTemplate(read_templates(folder, operators), tokenizer.special_tokens, bounds=bounds)
