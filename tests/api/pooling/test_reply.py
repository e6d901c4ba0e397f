"""Vectors and ranks in answers."""

from array import array
from base64 import b64decode

from harness import FakeEngine, request

from .test_endpoints import embed


def test_base64_is_little_endian_float32() -> None:
    (data,) = embed(FakeEngine(), encoding_format="base64").json["data"]
    assert array("f", b64decode(data["embedding"])).tolist() == [0.5, -1.0]


def test_top_n_without_the_documents() -> None:
    fields = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2, "return_documents": False}
    assert request(FakeEngine(), "/rerank", fields).json["results"] == [
        {"index": 2, "relevance_score": 0.75},
        {"index": 0, "relevance_score": 0.5},
    ]
