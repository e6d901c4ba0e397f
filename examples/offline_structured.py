"""Many prompts without a server, each answered by a JSON object that keeps to a schema.

python examples/offline_structured.py [MODEL]
"""

import json
import sys
from typing import Any

from pagewire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "is_capital": {"type": "boolean"},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "is_capital", "inhabitants"],
    "additionalProperties": False,
}
CITIES = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Quito", "Bern"]


def describe(llm: LLM, cities: list[str]) -> list[dict[str, Any]]:
    """An object for each city. All prompts run in one batch."""
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    conversations = [[{"role": "user", "content": f"Describe {city}"}] for city in cities]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    return [json.loads(output.outputs[0].text) for output in outputs]


def main() -> None:
    """Prints an object a line."""
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "", kv_cache_memory="256M") as llm:
        for found in describe(llm, CITIES):
            print(json.dumps(found))


if __name__ == "__main__":
    main()
