"""Vectors and ranks in answers."""

import json
import struct
from array import array
from base64 import b64decode
from typing import Any

import pytest
from harness import FakeEngine, request

from .test_endpoints import SCORING, embed


def test_base64_is_little_endian_float32() -> None:
    (data,) = embed(FakeEngine(), encoding_format="base64").json["data"]
    assert array("f", b64decode(data["embedding"])).tolist() == [0.5, -1.0]


def test_top_n_without_the_documents() -> None:
    fields = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2, "return_documents": False}
    assert request(FakeEngine(), "/rerank", fields, purpose=SCORING).json["results"] == [
        {"index": 2, "relevance_score": 0.75},
        {"index": 0, "relevance_score": 0.5},
    ]


@pytest.mark.parametrize(
    ("dtype", "endianness", "form"),
    [
        ("float32", "little", "<2f"),
        ("float32", "big", ">2f"),
        ("float16", "little", "<2e"),
        ("float16", "native", "=2e"),
    ],
)
@pytest.mark.parametrize("format", ["base64", "bytes", "bytes_only"])
def test_formats_of_numbers(format: str, dtype: str, endianness: str, form: str) -> None:
    fields: dict[str, Any] = {"encoding_format": format, "embed_dtype": dtype, "endianness": endianness}
    answer = embed(FakeEngine(), **fields, input=["a", "b"])
    if format == "base64":
        parts = [b64decode(data["embedding"]) for data in answer.json["data"]]
    else:
        half = len(answer.body) // 2
        parts = [answer.body[:half], answer.body[half:]]
        assert answer.headers["content-type"] == "application/octet-stream"
        assert ("metadata" in answer.headers) == (format == "bytes")
    assert [list(struct.unpack(form, part)) for part in parts] == [[0.5, -1.0], [0.25, 2.0]]
    if format == "bytes":
        metadata = json.loads(answer.headers["metadata"])
        places = [(item["start"], item["end"], item["shape"]) for item in metadata["data"]]
        assert places == [(0, half, [2]), (half, 2 * half, [2])] and metadata["usage"]["total_tokens"] == 6


def test_bfloat16_is_rounded_to_the_nearest_even() -> None:
    engine = FakeEngine()
    engine.vectors = [[1.0, 1.00390625, 1.01171875, -2.5]]  # halfway between two, down and up
    answer = embed(engine, encoding_format="bytes_only", embed_dtype="bfloat16")
    assert struct.unpack("<4H", answer.body) == (0x3F80, 0x3F80, 0x3F82, 0xC020)
