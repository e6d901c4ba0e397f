"""How a stage of a pipeline serves its layers of a model."""

from dataclasses import replace

from ...config.config import EngineConfig
from ..models.stages import bounds_of, layers_of, lengths_of, stage_program, step_reads
from .served import Served, kv_shape_of, program_of


def part_of_stage(config: EngineConfig, served: Served, stage: int) -> Served:
    """served: the whole model, or a rank's part of all its layers. Raises ConfigError if the layers cannot be dealt."""
    spec, program = served.spec, served.program
    assert program is not None and spec.decoder is not None, "only described models are divided into stages"
    num_layers = len(spec.decoder.blocks)
    size, deals_experts = config.tensor_parallel_size, config.enable_expert_parallel
    whole = program_of(spec, 0, size, deals_experts=deals_experts)  # all ranks deal the layers of the same program
    lengths = lengths_of(whole, num_layers, config.pipeline_parallel_size, config.pipeline_layers)
    first, last = bounds_of(lengths)[stage]
    reads = step_reads(layers_of(whole, num_layers), lengths)
    share = f"{100 * reads[stage] / sum(reads):.0f} % of what a step reads"
    part = stage_program(program, first, last, num_layers)
    shape = replace(kv_shape_of(config, part), whole=served.kv_shape)
    layers = f"layers {first} to {last - 1}" if last - first > 1 else f"layer {first}"
    ends = [" with the embedding"] * (stage == 0) + [" with the head"] * (last == num_layers)
    return replace(served, program=part, kv_shape=shape, layers=f"{layers}{''.join(ends)} of {num_layers}, {share}")
