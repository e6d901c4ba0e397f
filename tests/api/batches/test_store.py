"""Files of batches: stored, listed, deleted, each with one owner."""

import pytest

from .test_endpoints import Batches, request_line, run_work


def test_a_file_is_stored_listed_read_and_deleted() -> None:
    async def work(server: Batches) -> None:
        content = request_line("a") * 3
        file = (await server.upload(content)).json
        assert file | {"id": "", "created_at": 0} == {
            "id": "",
            "object": "file",
            "bytes": len(content),
            "created_at": 0,
            "filename": "in.jsonl",
            "purpose": "batch",
            "status": "processed",
        }
        assert (await server.call("GET", f"/v1/files/{file['id']}")).json == file
        assert (await server.call("GET", f"/v1/files/{file['id']}/content")).body == content.encode()
        second = (await server.upload(content)).json
        page = (await server.call("GET", "/v1/files?limit=1")).json
        assert page["data"] == [second] and page["has_more"] is True and page["last_id"] == second["id"]
        page = (await server.call("GET", f"/v1/files?limit=5&after={second['id']}")).json
        assert page["data"] == [file] and page["has_more"] is False
        assert (await server.call("DELETE", f"/v1/files/{file['id']}")).json["deleted"] is True
        assert (await server.call("GET", f"/v1/files/{file['id']}")).status == 404

    run_work(work)


def test_answers_are_stored_when_uploads_no_longer_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        monkeypatch.setattr("pagewire.api.batches.store.MAX_STORED_BYTES", 0)
        ended = await server.until(batch["id"], "failed", "completed")
        assert ended["status"] == "completed" and len(await server.lines(ended["output_file_id"])) == 1
        assert (await server.upload("x")).status == 413

    run_work(work)


def test_files_and_batches_belong_to_their_key() -> None:
    async def work(server: Batches) -> None:
        batch = await server.create(request_line("a"))
        await server.until(batch["id"], "completed")
        server.key = "two"
        for path in (f"/v1/files/{batch['input_file_id']}", f"/v1/batches/{batch['id']}"):
            assert (await server.call("GET", path)).status == 404
        assert (await server.call("GET", "/v1/batches")).json["data"] == []
        body = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/completions"}
        answer = await server.call("POST", "/v1/batches", body)
        assert answer.status == 400 and answer.error["param"] == "input_file_id"

    run_work(work, api_keys=("one", "two"))
