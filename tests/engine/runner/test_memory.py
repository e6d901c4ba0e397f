"""The lines that report a memory plan."""

from pagewire.engine.runner.memory import MemoryPlan, size


def test_lines_report_sizes_blocks_and_requests():
    plan = MemoryPlan(weights=4_100_000, workspace=20 << 20, block=32 << 10, block_size=16, max_model_len=8192)
    (line,) = plan.lines(65_536)
    assert line.startswith("weights 3.9 MB | workspace 20.0 MB | KV cache 2.0 GB = 65,536 blocks of 16 tokens, ")
    assert line.endswith("128 requests of 8,192 tokens")
    assert plan.lines(512)[0].endswith("1 request of 8,192 tokens")
    assert plan.lines(511)[0].endswith("less than one request of 8,192 tokens")
    assert size(512) == "512 bytes"
