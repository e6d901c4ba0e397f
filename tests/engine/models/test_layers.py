"""Where layers begin and end, and where the hidden states are between them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import checkpoints
import families
import pytest
import transformers
from decoders import of_checkpoint
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagewire.engine.models.description import Attention, Decoder, Sublayer
from pagewire.engine.models.families import describe
from pagewire.engine.models.fields import Fields
from pagewire.engine.models.layers import NoHiddenStatesError, layer_spans
from pagewire.engine.models.lower import lower

KINDS = ("llama", "gpt_neox", "qwen3", "qwen3_moe", "gemma2", "gemma3", "granite", "bamba", "jamba", "lfm2", "mamba2")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_follow_each_other_and_pass_on_the_hidden_states(kind: str) -> None:
    decoder = of_checkpoint(kind)
    assert decoder is not None
    program = lower(decoder)
    spans = layer_spans(program, len(decoder.blocks))
    assert [span.layer for span in spans] == list(range(len(decoder.blocks)))
    for span in spans:
        assert {op.layer for op in program.ops[span.first : span.last]} == {span.layer}
        assert span.before.width == span.after.width == decoder.hidden and not span.is_read_elsewhere
    ends = {op.layer for op in (*program.ops[: spans[0].first], *program.ops[spans[-1].last :])}
    assert ends <= {-1, len(decoder.blocks)}
    for one, following in pairwise(spans):
        assert (one.last, one.after) == (following.first, following.before)


def of_family(kind: str) -> Decoder:
    """The description of a family that has its own fields in `families.py`."""
    config = transformers.AutoConfig.for_model(kind, **{**checkpoints.COMMON, **families.FAMILIES[kind][0]})
    raw = json.loads(config.to_json_string(use_diff=False))
    return describe(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], Fields(raw, Path("config.json")))


def test_streams_beside_each_other_are_no_hidden_states() -> None:
    decoder = of_family("gemma3n_text")
    with pytest.raises(NoHiddenStatesError, match="columns instead of 64 hidden states"):
        layer_spans(lower(decoder), len(decoder.blocks))


def test_layers_whose_keys_others_read_are_known() -> None:
    """The last two layers of four share the keys of those before them."""
    decoder = of_family("llama4_text")
    blocks = decoder.blocks[:1]
    shares = replace(blocks[0], sublayers=tuple(map(_sharing, blocks[0].sublayers)))
    spans = layer_spans(lower(replace(decoder, blocks=(blocks[0], shares))), 2)
    assert [span.is_read_elsewhere for span in spans] == [True, False]


def _sharing(sublayer: Sublayer) -> Sublayer:
    """With the keys and values of layer 0."""
    branches = tuple(
        replace(branch, body=replace(branch.body, k=None, v=None, shared=0))
        if isinstance(branch.body, Attention)
        else branch
        for branch in sublayer.branches
    )
    return replace(sublayer, branches=branches)
