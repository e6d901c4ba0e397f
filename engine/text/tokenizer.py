"""A model's tokenizer: text to ids, ids to bytes and text.

Owns the `tokenizers` library's object and what tokenizer_config.json adds to it. Knows nothing of requests, templates
or streams; the tokenizer and detokenizer processes and the offline API each load one.

Special tokens in text from a *client* (`<|im_end|>` in a chat message) must not become control tokens. `neutralize`
replaces each by a sentinel. The sentinels are added tokens, so the library splits the rendered template exactly as it
would without them, and `encode_rendered` then replaces each sentinel's id by the ids of the special token's text. A
text without such strings takes the ordinary path.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import tokenizers

from ...config.model_files import read_file, read_object
from ...errors import ConfigError, PagewireError, RequestError
from ..checkpoint.files_digest import VOCABULARIES
from ..checkpoint.gguf import is_gguf
from .gguf_tokenizer import gguf_tokenizer

SENTINEL = "\ufdd0"  # a noncharacter, in no text; followed by one private-use character for each special token
_SENTINEL_BASE = 0x10F000
_INEXACT_BYTES = 256  # of text per token, at most, where spaces vanish and a long word is one unknown token

LeadingSpace = Literal["keep", "strip", "strip_token"]
"""What decoding does at the start of a text: nothing; drop one space; drop all spaces of the first token."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: byte-level vocabularies write each byte as one printable character."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


class Tokenizer:
    """One model's tokenizer. Not for use from several threads at once."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, object]) -> None:
        """`settings`: tokenizer_config.json with special_tokens_map.json merged in."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(settings.get(name)))}
        named = settings.get("tokenizer_class")
        self.class_name = named if isinstance(named, str) else ""
        _add_declared_tokens(backend, settings, self.special_tokens.values())
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._added_text = {id: token.content for id, token in added.items()}
        self._decoding = _Decoding.of(backend)
        self._longest_token = max(
            self._decoding.longest(vocabulary), *(len(text.encode()) for text in self._added_text.values()), 1
        )
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._whole_texts: dict[int, str | None] = {}
        self._plain_ids_of: dict[int, list[int]] = {}  # a sentinel's id → the ids of its special token as plain text
        self._sentinel_of: dict[str, str] = {}
        self._specials = re.compile("(?!)")
        self._add_sentinels([added[id].content for id in sorted(self.special_ids) if added[id].content])

    @property
    def added_tokens(self) -> Iterable[tokenizers.AddedToken]:
        """Tokens that are found before the rest of a text is encoded, sentinels included."""
        return self._backend.get_added_tokens_decoder().values()

    @property
    def is_random(self) -> bool:
        """Whether the same text may get other ids the next time, as in training."""
        return bool(getattr(self._backend.model, "dropout", None))

    # ── to ids ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def most_bytes(self, num_tokens: int) -> int:
        """A text of more UTF-8 bytes than this has more tokens, so encoding it, which is slow, can be avoided."""
        return num_tokens * (self._longest_token if self.is_byte_exact else max(self._longest_token, _INEXACT_BYTES))

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """The ids of `text` as the library encodes it: special tokens in it are parsed. `max_tokens`: the text is cut
        at its end to fit. Raises RequestError if not even the special tokens around it fit."""
        with self._truncating(max_tokens, add_special_tokens):
            # Computes no offsets, which nothing here reads: half the time of `encode`. It also releases the GIL.
            batch = _safely(self._backend.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
            return self._expand(batch[0].ids)

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around them."""
        return [
            self._expand(one.ids) for one in _safely(self._backend.encode_batch_fast, texts, add_special_tokens=False)
        ]

    def encode_pair(self, first: str, second: str, *, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """(ids, the type id of each: usually 0 for the first text and 1 for the second). `max_tokens`: the longer text
        is cut at its end to fit. Raises RequestError as `encode` does."""
        with self._truncating(max_tokens, True, is_pair=True):
            encoding = _safely(self._backend.encode, first, second)  # the fast one gives other type ids
        ids, type_ids = encoding.ids, encoding.type_ids
        return self._expand(ids), [
            kind for id, kind in zip(ids, type_ids, strict=True) for _ in self._plain_ids_of.get(id, (id,))
        ]

    @contextmanager
    def _truncating(self, max_tokens: int | None, add_special_tokens: bool, *, is_pair: bool = False) -> Iterator[None]:
        if max_tokens is None:
            yield
            return
        least = self._backend.num_special_tokens_to_add(is_pair) if add_special_tokens else 0
        if max_tokens <= least:
            raise RequestError("invalid_request", f"truncate_prompt_tokens must be more than {least}, which are "
                               "special tokens that the model needs.")  # fmt: skip
        self._backend.enable_truncation(max_tokens)
        try:
            yield
        finally:
            self._backend.no_truncation()

    def neutralize(self, text: str) -> str:
        """`text` with each special token's string replaced by a sentinel. For text from clients."""
        return self._specials.sub(lambda match: self._sentinel_of[match[0]], text)

    def split_specials(self, text: str) -> Iterator[str | int]:
        """`text` split into ordinary texts and the ids of its special tokens."""
        end = 0
        for match in self._specials.finditer(text):
            if match.start() > end:
                yield text[end : match.start()]
            id = self._backend.token_to_id(match[0])
            assert id is not None, match[0]
            yield id
            end = match.end()
        if end < len(text):
            yield text[end:]

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a rendered chat template: its own special tokens are parsed, `neutralize`d ones are plain text."""
        return self.encode(text, add_special_tokens=False)

    def _expand(self, ids: list[int]) -> list[int]:
        if not self._plain_ids_of or max(ids, default=0) < self.vocab_size:
            return ids
        expanded: list[int] = []
        for id in ids:
            expanded.extend(self._plain_ids_of.get(id, (id,)))
        return expanded

    def _add_sentinels(self, specials: Sequence[str]) -> None:
        """Encodes every special token as plain text once, and teaches the library the sentinels."""
        self._backend.encode_special_tokens = True
        plain = {text: self._encode_plain(text) for text in specials}
        self._backend.encode_special_tokens = False
        self._sentinel_of = {text: SENTINEL + chr(_SENTINEL_BASE + i) for i, text in enumerate(plain)}
        self._backend.add_special_tokens(
            [tokenizers.AddedToken(sentinel, special=True, normalized=False) for sentinel in self._sentinel_of.values()]
        )
        for text, sentinel in self._sentinel_of.items():
            id = self._backend.token_to_id(sentinel)
            assert id is not None and id >= self.vocab_size, f"the sentinel of {text!r} has id {id}"
            self._plain_ids_of[id] = plain[text]
        if plain:
            self._specials = any_of(plain)

    def _encode_plain(self, text: str) -> list[int]:
        """The ids of a special token's string as text; `encode_special_tokens` must be on. Where the vocabulary has the
        string as an ordinary entry too, it is encoded character by character."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self.special_ids.isdisjoint(ids):
            return ids
        spelled = [id for char in text for id in self._backend.encode(char, add_special_tokens=False).ids]
        return [id for id in spelled if id not in self.special_ids]

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    # ── from ids ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def leading_space(self) -> LeadingSpace:
        """What happens to a space at the start of a decoded text."""
        return self._decoding.leading_space

    @property
    def is_byte_exact(self) -> bool:
        """Whether the bytes of a text are those of its tokens joined, apart from `leading_space`."""
        return self._decoding.is_byte_exact

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, which begin a text; `IncrementalDetokenizer` gives the same in pieces. Bytes that are not
        UTF-8 become U+FFFD; unknown ids are skipped."""
        if not self.is_byte_exact:
            return self.decode_window(ids, skip_special_tokens)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        visible = [id for id in ids if id not in skipped]
        data = [self.token_bytes(id) for id in visible]
        if visible:
            data[0] = self.first_token_bytes(visible[0])
        return self.strip_start(b"".join(data)).decode("utf-8", "replace")

    def decode_window(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The library's own decoding, for vocabularies that are not byte exact."""
        known = [id for id in ids if id < self.vocab_size]
        return _safely(self._backend.decode, known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that this token adds within a text; empty for an unknown id."""
        data = self._bytes.get(id)
        if data is None:
            data = self._bytes[id] = self._find_bytes(id)
        return data

    def first_token_bytes(self, id: int) -> bytes:
        """The bytes of a token that begins a text."""
        data = self.token_bytes(id)
        return data.replace(b" ", b"") if self.leading_space == "strip_token" and id not in self._added_text else data

    def strip_start(self, data: bytes) -> bytes:
        """`data`, the first bytes of a text, without the space that the vocabulary puts before every text."""
        return data[1:] if self.leading_space == "strip" and data.startswith(b" ") else data

    def token_text(self, id: int) -> str:
        """The token as readable text; bytes that are not a whole character become U+FFFD."""
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = self.token_bytes(id).decode("utf-8", "replace")
        return text

    def piece(self, id: int) -> str:
        """The token as the vocabulary has it, such as `Ġis`; empty if there is none with this id."""
        return self._backend.id_to_token(id) or "" if 0 <= id < self.vocab_size else ""

    def whole_text(self, id: int) -> str | None:
        """The text that this token adds after whole characters, if it is whole characters itself. None for special
        tokens, and in vocabularies where it depends on other tokens."""
        try:
            return self._whole_texts[id]
        except KeyError:
            text = self.token_text(id)
            is_whole = self.is_byte_exact and id not in self.special_ids and "\ufffd" not in text
            return self._whole_texts.setdefault(id, text if is_whole else None)

    def _find_bytes(self, id: int) -> bytes:
        if id < 0 or id >= self.vocab_size or id in self._plain_ids_of:
            return b""
        if id in self._added_text:
            return self._added_text[id].encode()
        token = self._backend.id_to_token(id)
        return b"" if token is None else self._decoding.bytes_of(token)


P = ParamSpec("P")
T = TypeVar("T")


def _safely(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls the library, and raises RuntimeError if it panics, which some tokenizer.json files cause. Its own exception
    is not an Exception, so a single prompt would end the process."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which cannot be imported
            raise
        raise RuntimeError(f"the tokenizers library panicked: {error}") from None


class _Decoding:
    """How a tokenizer's decoder turns a vocabulary entry into bytes, read from the decoder's own description."""

    def __init__(
        self,
        *,
        byte_level: bool,
        replaced: tuple[str, str],
        byte_fallback: bool,
        leading_space: LeadingSpace,
        exact: bool,
    ) -> None:
        self._byte_level = byte_level
        self._replaced = replaced
        self._byte_fallback = byte_fallback
        self.leading_space: LeadingSpace = leading_space
        self.is_byte_exact = exact

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "_Decoding":
        decoder = backend.decoder
        described = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
        parts = described["decoders"] if described["type"] == "Sequence" else [described]
        byte_level = byte_fallback = False
        exact = True
        replaced = ("", "")
        leading_space: LeadingSpace = "keep"
        for part in parts:
            match part:
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if replaced == ("", ""):
                    replaced = (old, new)
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    leading_space = "strip"
                case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": str(scheme)}:
                    replaced = (old, " ")
                    leading_space = "keep" if scheme == "never" else "strip_token"
                case _:  # WordPiece, CTC and other decoders that look at neighbours
                    exact = False
        return cls(
            byte_level=byte_level,
            replaced=replaced,
            byte_fallback=byte_fallback,
            leading_space=leading_space,
            exact=exact and decoder is not None,
        )

    def longest(self, vocabulary: Iterable[str]) -> int:
        """An upper bound of the bytes of any entry. Cheap, because each start computes it over the whole vocabulary."""
        return max((len(token) if self._byte_level else len(token.encode()) for token in vocabulary), default=1)

    def bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            values = [_BYTE_OF.get(char) for char in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass  # an ordinary token that only looks like one
        old, new = self._replaced
        return (token.replace(old, new) if old else token).encode()


_Tree = dict[str, "_Tree"]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A regular expression that matches the longest of `texts`, of which there is one.

    It is a tree of characters: hundreds of special tokens have a common prefix, and as a plain list each of them would
    be tried at every place of a text that is made of such prefixes."""
    root: _Tree = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}  # a text ends here
    return re.compile(_pattern(root))


def _pattern(node: _Tree) -> str:
    stem = ""
    while len(node) == 1 and "" not in node:
        ((char, node),) = node.items()
        stem += re.escape(char)
    branches = "|".join(re.escape(char) + _pattern(rest) for char, rest in node.items() if char)
    return stem + (f"(?:{branches}){'?' if '' in node else ''}" if branches else "")


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the checkpoint in `folder`, or of a GGUF file. Raises ConfigError if it is missing or damaged,
    and CheckpointError for a damaged GGUF file."""
    if is_gguf(folder):
        return _load_gguf(folder)
    path = folder / "tokenizer.json"
    settings: dict[str, object] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= read_object(folder / name) or {}
    try:
        data = read_file(path)
    except FileNotFoundError:
        return _load_with_transformers(folder, settings)
    try:
        return _safely(lambda: Tokenizer(tokenizers.Tokenizer.from_buffer(data), settings))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path} is damaged: {error}.") from None


def _load_gguf(path: Path) -> Tokenizer:
    try:
        return Tokenizer(*_safely(gguf_tokenizer, path))
    except PagewireError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path} has a damaged tokenizer: {error}.") from None


def _load_with_transformers(folder: Path, settings: Mapping[str, object]) -> Tokenizer:
    """For checkpoints without tokenizer.json: transformers builds the same kind of object from older files."""
    if not any(path.is_file() for name in VOCABULARIES for path in folder.glob(name)):
        raise ConfigError(f"{folder} has no tokenizer: there is no tokenizer.json in it.")
    from transformers import AutoTokenizer  # seconds of import, so only here

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{folder} has no tokenizer.json, and transformers cannot load its tokenizer: {reason}"
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(f"{folder} has no tokenizer.json, and its tokenizer cannot be turned into one.")
    return Tokenizer(backend, {**settings, **loaded.special_tokens_map})


def _token_text(value: object) -> str | None:
    """A token in a config file is a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_declared_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, object], named: Iterable[str]) -> None:
    """Adds the tokens that only tokenizer_config.json declares, as transformers does."""
    declared = settings.get("added_tokens_decoder")
    specials: list[tokenizers.AddedToken] = []
    plain: list[tokenizers.AddedToken] = []
    if isinstance(declared, dict):
        for _, entry in sorted(declared.items(), key=lambda item: int(item[0]) if str(item[0]).isdigit() else 0):
            text = _token_text(entry)
            if text is None:
                continue
            flags = {
                name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry
            }
            is_special = bool(entry.get("special"))
            token = tokenizers.AddedToken(text, special=is_special, **flags)
            (specials if is_special else plain).append(token)
    more = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or ()
    values = more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
    known = {token.content for token in specials}
    for text in (*named, *(text for value in values if (text := _token_text(value)))):
        # A named token that the vocabulary lacks is not added: a new id would lie outside the model's embedding.
        if text not in known and backend.token_to_id(text) is not None:
            specials.append(tokenizers.AddedToken(text, special=True, normalized=False))
            known.add(text)
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in plain if token.content not in present])
    backend.add_special_tokens(
        [token for token in specials if token.content not in present or not present[token.content].special]
    )
