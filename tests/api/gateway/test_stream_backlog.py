"""What a client leaves unread is bounded."""

import pytest
from harness import run

from pagewire.api.gateway.stream_backlog import MAX_BACKLOG_BYTES
from pagewire.api.http.http_error import HttpError
from pagewire.ipc.messages import (
    TextBatch,
)

from .test_gateway import BASE, Box, chunk, order


def test_what_is_left_unread_is_bounded() -> None:
    async def work() -> None:
        box = Box()
        slow, other = box.gateway.submit([order()]), box.gateway.submit([order()])
        text = "x" * 1000
        for _ in range(MAX_BACKLOG_BYTES // 1004):
            box.gateway.handle([TextBatch((chunk(BASE, text),))])
        assert not box.cancelled
        box.gateway.handle([TextBatch((chunk(BASE, text), chunk(BASE + 1)))])
        assert box.cancelled == [(BASE,)] and box.gateway.stats.aborts["client_too_slow"] == 1
        with pytest.raises(HttpError) as error:
            await slow.chunks()
        assert (error.value.status, error.value.code) == (408, "client_too_slow")
        assert len(await other.chunks()) == 1

    run(work())
