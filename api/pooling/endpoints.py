"""POST /v1/embeddings, /pooling, /classify, /v1/rerank and /v1/score; the last two also at other servers' paths."""

import time

from starlette.types import Receive, Scope, Send

from ..http.exchange import read_json
from ..http.operation import Operation
from ..openai.translate import decode_body, request_decoder
from ..output.service import Service
from .reply import ClassifyReply, RerankReply, ScoreReply, VectorsReply
from .request import class_submits, document_texts, embedding_submits, pair_submits, rerank_pairs, score_pairs
from .types import (
    ClassifyRequest,
    ClassList,
    EmbeddingList,
    EmbeddingsRequest,
    PoolingList,
    PoolRequest,
    RerankBody,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)


class PoolingEndpoints:
    """Vectors and scores. The tokenizer process refuses them if the model is not made for them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._embeddings_decoder = request_decoder(EmbeddingsRequest)
        self._pool_decoder = request_decoder(PoolRequest)
        self._classify_decoder = request_decoder(ClassifyRequest)
        self._rerank_decoder = request_decoder(RerankRequest)
        self._score_decoder = request_decoder(ScoreRequest)

    def routes(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/v1/embeddings",
                self.embeddings,
                "Vectors of texts",
                takes=EmbeddingsRequest,
                example={"input": "Count from 1 to 5"},
                gives=EmbeddingList,
            ),
            Operation(
                "POST", "/pooling", self.pool, "What the model makes of texts", takes=PoolRequest, gives=PoolingList
            ),
            Operation("POST", "/classify", self.classify, "The class of texts", takes=ClassifyRequest, gives=ClassList),
            *(
                Operation(
                    "POST",
                    f"{at}/rerank",
                    self.rerank,
                    "Documents by how well they fit a query",
                    takes=RerankRequest,
                    gives=RerankBody,
                )
                for at in ("", "/v1", "/v2")
            ),
            *(
                Operation("POST", f"{at}/score", self.score, "How well texts fit", takes=ScoreRequest, gives=ScoreList)
                for at in ("", "/v1")
            ),
        ]

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._embeddings_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        submits = embedding_submits(request, self._service.config, scope["state"]["salt"])
        reply = VectorsReply(request, model=model, num=len(submits))
        await self._service.answer(submits, reply, False, scope, receive, send)

    async def pool(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The task is, if the request does not say it, the model's own."""
        request = decode_body(self._pool_decoder, await read_json(scope, receive))
        model, config, salt = self._service.model_name(request.model), self._service.config, scope["state"]["salt"]
        task = request.task or ("embed" if "embed" in config.model.purpose.tasks else "score")
        size: int | None = None
        if task in ("score", "classify"):
            submits = class_submits(request, config, salt)
        elif task == "token_embed":
            submits = embedding_submits(request, config, salt, how="all")
            size = request.dimensions or config.model.purpose.size
        else:
            submits = embedding_submits(request, config, salt)
        reply = VectorsReply(request, model=model, num=len(submits), is_pooling=True, size=size)
        await self._service.answer(submits, reply, False, scope, receive, send)

    async def classify(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._classify_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        submits = class_submits(request, self._service.config, scope["state"]["salt"])
        labels = self._service.config.model.purpose.labels
        reply = ClassifyReply(model=model, num=len(submits), labels=labels)
        await self._service.answer(submits, reply, False, scope, receive, send)

    async def rerank(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._rerank_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        scoring = pair_submits(request, rerank_pairs(request), self._service.config, scope["state"]["salt"])
        reply = RerankReply(
            model=model,
            texts=document_texts(request),
            top_n=request.top_n,
            has_documents=request.return_documents is not False,
            num=len(scoring.submits),
            pairs=scoring.pairs,
        )
        await self._service.answer(scoring.submits, reply, False, scope, receive, send)

    async def score(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._score_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        scoring = pair_submits(request, score_pairs(request), self._service.config, scope["state"]["salt"])
        reply = ScoreReply(model=model, num=len(scoring.submits), created=int(time.time()), pairs=scoring.pairs)
        await self._service.answer(scoring.submits, reply, False, scope, receive, send)
