"""POST /v1/embeddings, /v1/rerank and /v1/score; the latter two also at the paths of other servers."""

import time

from starlette.types import Receive, Scope, Send

from ..http.exchange import read_json
from ..http.operation import Operation
from ..openai.translate import decode_body, request_decoder
from ..output.service import Service
from .reply import EmbeddingsReply, RerankReply, ScoreReply
from .request import document_texts, embedding_submits, pair_submits, rerank_pairs, score_pairs
from .types import EmbeddingList, EmbeddingsRequest, RerankBody, RerankRequest, ScoreList, ScoreRequest


class PoolingEndpoints:
    """Vectors and scores. The tokenizer process refuses them if the model is not made for them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._embeddings_decoder = request_decoder(EmbeddingsRequest)
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
        reply = EmbeddingsReply(model=model, num=len(submits), is_base64=request.encoding_format == "base64")
        await self._service.answer(submits, reply, False, scope, receive, send)

    async def rerank(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._rerank_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        submits = pair_submits(request, rerank_pairs(request), self._service.config, scope["state"]["salt"])
        reply = RerankReply(
            model=model,
            texts=document_texts(request),
            top_n=request.top_n,
            has_documents=request.return_documents is not False,
        )
        await self._service.answer(submits, reply, False, scope, receive, send)

    async def score(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_body(self._score_decoder, await read_json(scope, receive))
        model = self._service.model_name(request.model)
        submits = pair_submits(request, score_pairs(request), self._service.config, scope["state"]["salt"])
        reply = ScoreReply(model=model, num=len(submits), created=int(time.time()))
        await self._service.answer(submits, reply, False, scope, receive, send)
