"""How a stage of a pipeline serves its layers of a model."""

from dataclasses import replace

from ...config.config import EngineConfig
from ..models.stages import bounds_of, lengths_of, stage_program
from .served import Served, kv_shape_of, program_of


def part_of_stage(config: EngineConfig, served: Served, stage: int) -> Served:
    """served: the whole model, or a rank's part of all its layers. Raises ConfigError if the layers cannot be dealt."""
    spec, program = served.spec, served.program
    assert program is not None and spec.decoder is not None, "only described models are divided into stages"
    num_layers = len(spec.decoder.blocks)
    first, last = layers_of_stages(config, served)[stage]
    part = stage_program(program, first, last, num_layers)
    shape = replace(kv_shape_of(config, part), whole=served.kv_shape)
    layers = f"layers {first} to {last - 1}" if last - first > 1 else f"layer {first}"
    ends = [" with the embedding"] * (stage == 0) + [" with the head"] * (last == num_layers)
    return replace(served, program=part, kv_shape=shape, layers=f"{layers}{''.join(ends)} of {num_layers}")


def layers_of_stages(config: EngineConfig, served: Served) -> list[tuple[int, int]]:
    """[first, last) of each stage, the same on all ranks. Raises ConfigError."""
    assert served.spec.decoder is not None
    whole = program_of(served.spec, 0, config.tensor_parallel_size)
    num_layers, num_stages = len(served.spec.decoder.blocks), config.pipeline_parallel_size
    return bounds_of(lengths_of(whole, num_layers, num_stages, config.pipeline_layers))
