"""docs/from-vllm.md is what the tables say, and the tables have the flags of a version of vLLM."""

from pathlib import Path

from pagewire.config.vllm_flags import ALIASES, FLAGS
from pagewire.tools import from_vllm


def test_the_page_is_up_to_date() -> None:
    page = from_vllm.page()
    assert all(f"`{name}`" in page for flag in FLAGS for name in flag.names) and all(
        f"`{one}`" in page for one in ALIASES
    )
    assert page == from_vllm.PAGE.read_text(), "run python -m pagewire.tools.from_vllm"


def test_differences_from_the_source_of_vllm(tmp_path: Path) -> None:
    engine, serving = tmp_path / "vllm/engine/arg_utils.py", tmp_path / "vllm/entrypoints/launchers/cli_args.py"
    for path in (engine, serving):
        path.parent.mkdir(parents=True)
    calls = ('"--seed", **kwargs', '"--tensor-parallel-size", "-tp"', '"--new"')
    engine.write_text("".join(f"group.add_argument({call})\n" for call in calls))
    serving.write_text("class FrontendArgs:\n    root_path: str = ''\n    newer_still: int = 1")
    lacking, gone = from_vllm.differences(tmp_path)
    assert lacking == {"--new", "--newer-still"}
    assert "--enforce-eager" in gone and not gone & {"--seed", "--tensor-parallel-size", "--root-path", "--grpc"}
