"""The memory that models would take, as a process of its own calculates it: that of the forecast."""

import subprocess

import msgspec

from pagewire.config.flags import make_config
from pagewire.engine.runner.forecast import forecast
from pagewire.engine.runner.needs import Need, Question
from pagewire.procs import interpreter
from pagewire.procs.prepare import prepare


def test_needs_are_those_of_the_forecast_and_a_problem_is_said() -> None:
    served = prepare(make_config(model="demo", kv_cache_memory="16M", threads=1))
    broken = msgspec.structs.replace(served, model=msgspec.structs.replace(served.model, path="/nowhere"))
    done = subprocess.run(
        [*interpreter.COMMAND, "pagewire.engine.runner.needs"],
        input=msgspec.json.encode([Question(served), Question(broken)]),
        stdout=subprocess.PIPE,
        env=interpreter.environment(),
        check=True,
    )
    need, problem = msgspec.json.decode(done.stdout, type=list[Need])
    found = forecast(served)
    assert need == Need(found.memory.weights, found.memory.workspace, found.num_pages * found.memory.page_bytes)
    assert 0 < need.kv_cache <= 16 << 20 and problem.problem.endswith(".") and not problem.weights
