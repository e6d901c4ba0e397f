"""llama.cpp's sampling parameters in the terms of ours."""

import msgspec
import pytest

from pagewire.api.http.http_error import HttpError
from pagewire.api.llamacpp.sampling import SamplingOptions, sampling_fields


def test_absent_parameters_leave_the_models_defaults() -> None:
    assert set(sampling_fields(SamplingOptions(), None).values()) == {None}


def test_a_penalty_over_no_tokens_is_none() -> None:
    fields = sampling_fields(SamplingOptions(repeat_last_n=0, repeat_penalty=2.0, presence_penalty=1.0), 5)
    assert (fields["repetition_penalty"], fields["presence_penalty"], fields["max_tokens"]) == (1.0, 0.0, 5)


@pytest.mark.parametrize(("name", "off"), [("typical_p", 1.0), ("mirostat", 0), ("top_n_sigma", -1.0)])
def test_other_samplers_must_be_off(name: str, off: float) -> None:
    sampling_fields(msgspec.convert({name: off}, SamplingOptions), None)
    with pytest.raises(HttpError, match=f"^options.{name} is not supported"):
        sampling_fields(msgspec.convert({name: 0.5}, SamplingOptions), None, "options.")
