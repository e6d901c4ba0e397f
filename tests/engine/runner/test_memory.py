"""The lines that report a memory plan."""

from pagewire.engine.attention.cache_groups import FULL, CacheGroups, Lifetime
from pagewire.engine.runner.memory import MemoryPlan, size


def test_lines_report_sizes_blocks_and_requests():
    groups = CacheGroups.of([(FULL, 32 << 10)], block_size=16)
    plan = MemoryPlan(weights=4_100_000, workspace=20 << 20, groups=groups, block_size=16, max_model_len=8192)
    (line,) = plan.lines(65_536)
    assert line.startswith("weights 3.9 MB | workspace 20.0 MB | KV cache 2.0 GB = 65,536 blocks of 16 tokens, ")
    assert line.endswith("128 requests of 8,192 tokens")
    assert plan.lines(512)[0].endswith("1 request of 8,192 tokens")
    assert plan.lines(511)[0].endswith("less than one request of 8,192 tokens")
    assert size(512) == "512 bytes"


def test_lines_report_pages_of_several_groups():
    tiles = [(FULL, 64 << 10), (Lifetime("window", 1024), 64 << 10), (Lifetime("window", 1024), 64 << 10)]
    tiles += [(Lifetime("state"), 48 << 10), (Lifetime("chunk", 8192), 16 << 10)]
    plan = MemoryPlan(
        weights=1, workspace=1, groups=CacheGroups.of(tiles, block_size=16), block_size=16, max_model_len=4096
    )
    of_request = 256 + 2 * 65 + 1 + 256  # pages
    (line,) = plan.lines(2 * of_request)
    assert line.endswith(
        f"{2 * of_request:,} pages of 64.0 kB (full attention: 1 page for 16 tokens; windows of 1,024: 2 pages for 16 "
        "tokens; chunks of 8,192: 1 page for 16 tokens; state: 1 page a request), 2 requests of 4,096 tokens"
    )
    assert plan.lines(2 * of_request - 1)[0].endswith("1 request of 4,096 tokens")


def test_lines_report_the_states_of_draft_tokens():
    tiles = [(FULL, 64 << 10), (Lifetime("state"), 48 << 10), (Lifetime("state"), 48 << 10)]
    plan = MemoryPlan(
        weights=1, workspace=1, groups=CacheGroups.of(tiles, block_size=16), block_size=16, max_model_len=4096
    )
    assert plan.lines(4000, 8)[0].endswith("15 requests of 4,096 tokens | 8 states for draft tokens 1.0 MB")
